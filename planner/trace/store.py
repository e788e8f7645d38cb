"""Where profiles are kept: those that the package ships, and the user's own, which a dry run has made on this machine.

A file's name is the recipe's key. The user's own are kept apart by the versions of the libraries that they come from.
"""

import importlib.metadata
import os
import tempfile
import zlib
from functools import lru_cache
from pathlib import Path

from planner.candidate import Candidate
from planner.quantities import PhaseMemory
from planner.trace.profile import PROFILE_SCHEMA, NoProfile, Profile, profile_from_json, profile_to_json
from planner.trace.recipe import key_of, recipe_of, sizes_of

SHIPPED = Path(__file__).resolve().parents[1] / "data" / "profiles"
SUFFIX = ".json.z"
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")


def load_profile(candidate: Candidate) -> Profile | None:
    """The profile that answers for a candidate: the user's own of the installed libraries, else a shipped one, else None."""
    try:
        return _loaded(key_of(recipe_of(candidate)), cache_folder())
    except NoProfile:
        return None


def save_profile(candidate: Candidate, profile: Profile) -> Path:
    """Keeps a profile in the user's cache; whoever reads meanwhile sees the whole file or none."""
    path = cache_folder() / (key_of(recipe_of(candidate)) + SUFFIX)
    write_profile(profile, path)
    _loaded.cache_clear()
    return path


def write_profile(profile: Profile, path: Path) -> None:
    """A profile as a file, the same bytes for the same profile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(zlib.compress(profile_to_json(profile).encode(), level=9))
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def cache_folder() -> Path:
    """The user's own profiles: $PLAN_CACHE, else $XDG_CACHE_HOME/plan, else ~/.cache/plan; within it by schema and libraries."""
    root = os.environ.get("PLAN_CACHE") or str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "plan")
    return Path(root) / "profiles" / f"schema-{PROFILE_SCHEMA}" / (_installed() or "no-libraries")


@lru_cache(maxsize=1)
def _installed() -> str:
    """The versions of the libraries that a dry run would run, empty where one of them is absent."""
    try:
        return "_".join(f"{name}-{importlib.metadata.version(name)}" for name in LIBRARIES)
    except importlib.metadata.PackageNotFoundError:
        return ""


@lru_cache(maxsize=256)
def _loaded(key: str, cache: Path) -> Profile | None:
    for folder in (cache, SHIPPED):
        profile = _read(folder / (key + SUFFIX))
        if profile is not None:
            return profile
    return None


def _read(path: Path) -> Profile | None:
    """The profile in a file; None where there is no file, and where it is broken or of another schema, so that it is made anew."""
    try:
        return profile_from_json(zlib.decompress(path.read_bytes()).decode())
    except (OSError, ValueError, zlib.error, KeyError, TypeError, NoProfile):
        return None


def simulated_phases(candidate: Candidate) -> tuple[PhaseMemory, ...] | None:
    """What PyTorch allocates in each phase of one process, by the profile of the candidate's recipe; None where there is none.

    Of one process, alone or data parallel. What PyTorch does not allocate, or not for the trainer, is put beside it by `decide.py`.
    """
    profile = load_profile(candidate)
    if profile is None:
        return None
    try:
        return profile.phases(sizes_of(candidate), _depth(candidate))
    except NoProfile:
        return None


def _depth(candidate: Candidate) -> int:
    depth = candidate.model.config["num_hidden_layers"]
    assert isinstance(depth, int)
    return depth
