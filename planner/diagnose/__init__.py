"""A log -> what ran out of memory, in which phase, and what fits instead."""
