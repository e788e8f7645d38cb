"""Add when a measurement was saved (UTC, ISO 8601); empty for rows from before."""

import sqlalchemy as sa
from alembic import op

revision = "v2"
down_revision = "v1"


def upgrade() -> None:
    op.add_column("plan_measurements", sa.Column("saved_at", sa.String(32), nullable=False, server_default=""))
