"""Seconds of a step: compute, attention, launches, links, decoding, the host."""
