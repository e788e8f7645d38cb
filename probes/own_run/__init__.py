"""The user's own run, as a callback in it sees it."""
