"""Create the table of measurements."""

import sqlalchemy as sa
from alembic import op

revision = "v1"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "plan_measurements",
        sa.Column("id", sa.Integer, primary_key=True, autoincrement=True),
        sa.Column("digest", sa.String(64), nullable=False, unique=True),  # SHA-256 of the line
        sa.Column("source", sa.String(16), nullable=False),
        sa.Column("gpu", sa.String(200), nullable=False),
        sa.Column("candidate", sa.String(64), nullable=False),  # `candidate_key`
        sa.Column("line", sa.Text, nullable=False),
    )
