"""Memory of a GPU: one file for each component; step.py walks a step and keeps the heaviest moment of each phase."""
