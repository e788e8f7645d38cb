"""Alembic's entry: runs the revisions on the connection that `team_results.migrate` gives."""

from alembic import context

from planner.measurements.team_results import VERSION_TABLE

context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
with context.begin_transaction():
    context.run_migrations()
