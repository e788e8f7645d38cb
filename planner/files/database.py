"""Databases that a team shares: the URL, shown without its secrets, and errors in one line."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote_plus

from planner.errors import InputError, PlanError
from planner.files.cache import PRIVATE_FILE, is_in_cache, make_folder

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

SQLITE = "sqlite:///"
POSTGRESQL = "postgresql"
LIBPQ = ("postgresql://", "postgresql+psycopg://", "postgresql+psycopg2://")  # URLs whose driver has libpq's settings
HIDDEN = "***"  # as SQLAlchemy shows a password
CONNECT_SECONDS = 10  # libpq's connect_timeout, for each address of the host; its default waits for TCP, minutes
# Longest wait for another process to release SQLite's file; its default of 5 s is too short for slow disks.
LOCK_SECONDS = 30.0
# Errors of a server that answers, of SQLAlchemy's class OperationalError; psycopg and psycopg2 name them alike.
# Source: PostgreSQL 15, appendix A, classes 53, 55 and 57.
ANSWERS = ("DiskFull", "OutOfMemory", "ConfigurationLimitExceeded", "LockNotAvailable", "QueryCanceled")
TURN = "SELECT pg_advisory_xact_lock(hashtext(:name))"


def storage_url(given: str | None) -> str:
    """Return the URL of the database: the given one, else $PLAN_STORAGE, else empty: the user's cache folder."""
    return given or os.environ.get("PLAN_STORAGE", "")


def hide_password(url: str) -> str:
    """Return a storage's URL with `***` instead of its password and of the values in its query.

    Raises:
        InputError: SQLAlchemy is missing, cannot parse the URL, or takes a part of its password for the host. The
            message does not show the URL: it may hold a password.
    """
    try:
        from sqlalchemy.engine import make_url
        from sqlalchemy.exc import ArgumentError
    except ImportError as error:
        raise InputError("--storage needs the extra storage: pip install 'finetune-plan[storage]'.") from error
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise InputError(f"--storage is no URL that SQLAlchemy can parse. Try {SQLITE}probes.db.") from None
    if "@" in (parsed.host or ""):
        raise InputError("--storage has a password with an @. Write %40 in its place.")
    # A query may hold more secrets, such as libpq's password and sslpassword: only its names are shown.
    shown = parsed.set(query=dict.fromkeys(parsed.query, HIDDEN))
    return shown.render_as_string(hide_password=True).replace(quote_plus(HIDDEN), HIDDEN)


def connect_settings(url: str) -> dict[str, int | float | str]:
    """Return the driver's settings for a connection: how long it waits, and the encoding."""
    if url.startswith(SQLITE):
        return {"timeout": LOCK_SECONDS}
    if not url.startswith(LIBPQ):
        return {}
    # psycopg gives bytes instead of text from a database in SQL_ASCII, the encoding of servers in the C locale.
    return {"connect_timeout": CONNECT_SECONDS, "client_encoding": "utf8"}


def new_engine(url: str) -> "Engine":
    """Return an engine that keeps no connection open between uses."""
    from sqlalchemy import NullPool, create_engine

    return create_engine(url, poolclass=NullPool, connect_args=connect_settings(url))


def make_folder_of(url: str) -> None:
    """Create the folder of an SQLite file. A file in the user's cache is created too, for its user alone.

    Raises:
        PlanError: it cannot be created.
    """
    if not url.startswith(SQLITE):
        return
    try:
        file = Path(os.path.realpath(Path(url.removeprefix(SQLITE)).expanduser()))
        make_folder(file.parent)
        if is_in_cache(file):
            file.touch(mode=PRIVATE_FILE)
    except OSError as error:
        raise PlanError(
            f"The study in {hide_password(url)} cannot be read or written: {error.strerror}: {error.filename}."
        ) from error


def wait_for_turn(connection: "Connection", name: str) -> None:
    """Begin a transaction that one process at a time may be in.

    On PostgreSQL by a lock of that name, on SQLite by the lock of the file. Other databases have none.
    """
    from sqlalchemy import text

    if connection.dialect.name == POSTGRESQL:
        connection.execute(text(TURN), {"name": name})
    elif connection.dialect.name == "sqlite":
        connection.exec_driver_sql("BEGIN IMMEDIATE")


def is_lost(error: BaseException, url: str) -> bool:
    """Return whether an error says that the database's server does not answer or has ended the connection."""
    from sqlalchemy.exc import DBAPIError, OperationalError

    cause = error if isinstance(error, DBAPIError) else error.__cause__
    if url.startswith(SQLITE) or not isinstance(cause, DBAPIError) or type(cause.orig).__name__ in ANSWERS:
        return False
    return isinstance(cause, OperationalError) or cause.connection_invalidated


def not_answering(error: BaseException, url: str) -> InputError:
    """Return the error of a server that does not answer."""
    return InputError(f"The database {hide_password(url)} does not answer: {error_line(error, url)}")


@contextmanager
def database_errors(url: str) -> Iterator[None]:
    """Turn the errors of a database into one line.

    Raises:
        InputError: there is no such database or driver, or its server does not answer.
        PlanError: the database cannot be read or written.
    """
    shown = hide_password(url)
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

    try:
        yield
    except (ArgumentError, NoSuchModuleError, ImportError) as error:
        raise InputError(
            f"--storage {shown} cannot be opened: {error_line(error, url)} Try {SQLITE}probes.db."
        ) from error
    except (SQLAlchemyError, UnicodeDecodeError) as error:  # UnicodeDecodeError: of SQLite, for a damaged schema
        if is_lost(error, url):
            raise not_answering(error, url) from error
        raise PlanError(f"The database {shown} cannot be read or written: {error_line(error, url)}") from error


def error_line(error: BaseException, url: str) -> str:
    """Return the first line of an error's cause, without the secrets of the URL, which libraries repeat."""
    from sqlalchemy.engine import make_url

    text = str(error.__cause__ or error).strip() or type(error).__name__
    line = text.splitlines()[0].rstrip(".") + "."
    parsed = make_url(url)
    for secret in (url, parsed.password, *map(str, parsed.query.values())):
        line = line.replace(str(secret), HIDDEN) if secret else line
    return line
