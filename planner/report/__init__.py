"""The answers as text: screen, table, JSON and its schema, HTML, pandas; all sentences."""
