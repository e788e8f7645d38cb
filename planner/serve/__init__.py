"""The answers over HTTP, and a form."""
