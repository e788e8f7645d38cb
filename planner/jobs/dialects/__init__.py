"""Configs of other tools: which tool a file is of, and what its keys say in the libraries' settings."""
