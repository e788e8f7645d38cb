"""The answers in a terminal: one file for each command, every flag, the exit codes."""
