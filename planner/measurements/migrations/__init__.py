"""Alembic's migrations of the database of measurements."""
