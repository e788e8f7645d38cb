"""Memory of a GPU: one file for each component; peak.py is the table phase x component."""
