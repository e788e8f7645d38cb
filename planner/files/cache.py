"""The user's cache folder: own measurements, studies, logs and the layers that were measured on this machine."""

import importlib.metadata
import os
from functools import lru_cache
from pathlib import Path

LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")


def cache_root() -> Path:
    """Return the folder of all files that `plan` keeps: $PLAN_CACHE, else $XDG_CACHE_HOME/plan, else ~/.cache/plan."""
    own = os.environ.get("PLAN_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plan"


def make_folder(folder: Path) -> None:
    """Create a folder with its parents. The cache's own folder is created for its user alone (mode 700).

    It holds logs of probes, measurements and studies, which may name models and paths that are nobody else's matter.
    """
    root = cache_root()
    if folder.is_relative_to(root):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)


@lru_cache(maxsize=1)
def installed_versions() -> str:
    """Return the releases of the training stack as a folder's name; "no-libraries" if one of them is not installed."""
    try:
        return "_".join(f"{name}-{importlib.metadata.version(name)}" for name in LIBRARIES)
    except importlib.metadata.PackageNotFoundError:
        return "no-libraries"
