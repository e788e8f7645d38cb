"""What the command does, a file for each kind of command: they parse, call and print, and nothing else prints."""
