"""The user's cache folder: own measurements, studies, logs and layers measured here; and names of temporary folders."""

import os
import shutil
import tempfile
import time
from functools import lru_cache
from pathlib import Path

from planner.errors import PlanError

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600  # permissions in the cache, also if its folder is open to others
LEFT_SECONDS = 86_400.0  # a temporary folder is removed at this age if its process is gone. Judged: longer than a probe
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")


def cache_root() -> Path:
    """Return the folder of all files that `plan` keeps: $PLAN_CACHE, else $XDG_CACHE_HOME/plan, else ~/.cache/plan."""
    own = os.environ.get("PLAN_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plan"


def make_folder(folder: Path) -> None:
    """Create a folder with its parents. Folders of the cache are created for their user alone (mode 700).

    They hold logs of probes, measurements and studies, which may name models and paths that are nobody else's matter.
    """
    if is_in_cache(folder):
        for each in (*reversed(folder.parents), folder):
            if is_in_cache(each):
                each.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


def require_folder(folder: Path) -> None:
    """Create a folder as `make_folder` does; raise PlanError if it cannot be created."""
    try:
        make_folder(folder)
    except OSError as error:
        raise PlanError(f"{folder} cannot be made: {error.strerror}. Set PLAN_CACHE to another folder.") from error


def is_in_cache(path: Path) -> bool:
    """Return whether a path is the cache's folder or lies within it."""
    root = cache_root()
    return path.is_relative_to(root) or Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


def temporary_prefix(kind: str, parent: str = "") -> str:
    """Return the beginning of a temporary folder's name, which has this process's id.

    Such folders in `parent` (empty: the system's) that are a day old and whose process is gone are removed: one that is
    killed by SIGKILL leaves its own.
    """
    for folder in Path(parent or tempfile.gettempdir()).glob(f"plan-{kind}-*-*"):
        try:
            old = time.time() - folder.stat().st_mtime > LEFT_SECONDS
        except OSError:
            continue
        process = folder.name.split("-")[2]
        if old and process.isdecimal() and not _runs(int(process)):
            shutil.rmtree(folder, ignore_errors=True)
    return f"plan-{kind}-{os.getpid()}-"


def _runs(process: int) -> bool:
    if os.name == "nt":
        return True  # there signal 0 is CTRL_C_EVENT
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True  # another user's
    return True


@lru_cache(maxsize=1)
def installed_versions() -> str:
    """Return the releases of the training stack as a folder's name; "no-libraries" if one of them is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and most commands do not ask

    try:
        return "_".join(f"{name}-{version(name)}" for name in LIBRARIES)
    except PackageNotFoundError:
        return "no-libraries"
