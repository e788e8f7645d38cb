"""The parent of a probe's process: start, limits, verdict; devices cuda, emulated, cpu."""
