"""Search: the settings that it may change (knobs.py), and the largest batch, length and engine that fit (search.py)."""
