"""A worker from outside, as a process: what it is told and how it is started, what it may use, and how it ended."""
