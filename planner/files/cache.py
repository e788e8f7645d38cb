"""The user's cache folder: own measurements, studies, logs and the layers that were measured on this machine."""

import os
from functools import lru_cache
from pathlib import Path

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600  # permissions in the cache, also if its folder is open to others
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


def is_in_cache(path: Path) -> bool:
    """Return whether a path is the cache's folder or lies within it."""
    root = cache_root()
    return path.is_relative_to(root) or Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root))


@lru_cache(maxsize=1)
def installed_versions() -> str:
    """Return the releases of the training stack as a folder's name; "no-libraries" if one of them is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and most commands do not ask

    try:
        return "_".join(f"{name}-{version(name)}" for name in LIBRARIES)
    except PackageNotFoundError:
        return "no-libraries"
