"""The measurements of a team: the lines of the user's own file (own_results.py) as rows of a database.

A row is unique by the digest of its line: of several writers of the same line one succeeds, and the others find it.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from planner.errors import InputError, PlanError
from planner.files.database import database_errors, error_line, hide_password, make_folder_of, new_engine, wait_for_turn

if TYPE_CHECKING:
    from sqlalchemy import Connection

MIGRATIONS = Path(__file__).with_name("migrations")
NEWEST_REVISION = "v2"  # of migrations/versions
# Optuna's storage keeps its own revision in "alembic_version" of the same database.
VERSION_TABLE = "plan_alembic_version"
INSERT = """
INSERT INTO plan_measurements (digest, source, gpu, candidate, line, saved_at)
VALUES (:digest, :source, :gpu, :candidate, :line, :saved_at)
"""


def line_digest(line: str) -> str:
    """Return the key of a line."""
    return hashlib.sha256(line.encode()).hexdigest()


def add_lines(url: str, lines: Iterable[str]) -> int:
    """Add the lines that the database does not have; return how many.

    Raises:
        PlanError: the database cannot be used.
    """
    added = 0
    with _opened(url) as connection:
        from sqlalchemy import text
        from sqlalchemy.exc import IntegrityError

        wait_for_turn(connection, VERSION_TABLE)
        for line in lines:
            fields = json.loads(line)
            row = {"digest": line_digest(line), "source": fields["source"], "gpu": fields["gpu"]}
            row |= {"candidate": fields["key"], "line": line}
            row |= {"saved_at": datetime.now(timezone.utc).isoformat(timespec="seconds")}
            try:
                with connection.begin_nested():
                    connection.execute(text(INSERT), row)
                added += 1
            except IntegrityError:
                continue  # another writer has added it
    return added


def team_lines(url: str) -> list[str]:
    """Return the lines of a database, oldest first; raise PlanError if the database cannot be used."""
    with _opened(url) as connection:
        from sqlalchemy import text

        # SQLite keeps a value of any type, and text that is no UTF-8, at which its driver refuses the whole answer.
        column = "CAST(line AS BLOB)" if connection.dialect.name == "sqlite" else "line"
        found = connection.scalars(text(f"SELECT {column} FROM plan_measurements ORDER BY id"))
        # "\xff" is no JSON, so that a reader drops that line alone.
        return [line.decode(errors="backslashreplace") if isinstance(line, bytes) else str(line) for line in found]


def remove_lines(url: str, lines: Iterable[str]) -> int:
    """Remove lines from a database; return how many it had.

    Raises:
        PlanError: the database cannot be used.
    """
    with _opened(url) as connection:
        from sqlalchemy import text

        statement = text("DELETE FROM plan_measurements WHERE digest = :digest")
        wait_for_turn(connection, VERSION_TABLE)
        return sum(connection.execute(statement, {"digest": line_digest(line)}).rowcount for line in lines)


def migrate(url: str, revision: str = NEWEST_REVISION) -> None:
    """Bring the tables up to a revision. One process at a time does so.

    Raises:
        InputError: the database does not answer, or a newer release has written it.
        PlanError: the database cannot be written, or somebody has emptied its revision.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with database_errors(url), new_engine(url).begin() as connection:
        wait_for_turn(connection, VERSION_TABLE)
        config.attributes["connection"] = connection
        try:
            command.upgrade(config, revision)
        except CommandError as error:
            raise InputError(
                f"{hide_password(url)} was written by a newer release ({error_line(error, url)}). Update finetune-plan."
            ) from error
        except AssertionError as error:  # of Alembic 1.20, runtime/migration.py, for an empty revision
            raise PlanError(f"{hide_password(url)} was altered: its table {VERSION_TABLE} has no revision.") from error


@contextmanager
def _opened(url: str) -> "Iterator[Connection]":
    """Yield a connection to a database with the newest tables; its changes are written together at the end."""
    with database_errors(url):
        make_folder_of(url)
        engine = new_engine(url)
        with engine.connect() as connection:
            ready = _revision(connection) == NEWEST_REVISION
    if not ready:
        migrate(url)
    with database_errors(url), engine.begin() as connection:
        yield connection


def _revision(connection: "Connection") -> str:
    """Return the revision of a database's tables; empty if it has none."""
    from sqlalchemy import inspect, text

    if not inspect(connection).has_table(VERSION_TABLE):
        return ""
    return str(connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}")) or "")
