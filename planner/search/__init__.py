"""What may be turned (knobs.py), and the largest batch, length and engine that fit (search.py)."""
