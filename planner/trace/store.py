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
from planner.trace.profile import PROFILE_SCHEMA, NoProfile, Profile, profile_from_json, profile_to_json
from planner.trace.recipe import family_key, key_of, recipe_of, regime_key

SHIPPED = Path(__file__).resolve().parents[1] / "data" / "profiles"
SUFFIX = ".json.z"
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate")


def load_profile(candidate: Candidate) -> Profile | None:
    """The profile that answers for a candidate: the user's own of the installed libraries, else a shipped one, else None.

    Takes microseconds where there is none: a search asks for every candidate.
    """
    families = _families(_folders())
    family = family_key(candidate)
    if family not in families:
        return None
    try:
        path = families[family].get(regime_key(candidate))
    except NoProfile:
        return None
    return None if path is None else _loaded(path)


def has_profiles(candidate: Candidate) -> bool:
    """Whether there are profiles of a candidate's recipe, for sizes like its own or other ones."""
    return family_key(candidate) in _families(_folders())


def save_profile(candidate: Candidate, profile: Profile) -> Path:
    """Keeps a profile in the user's cache; whoever reads meanwhile sees the whole file or none."""
    path = cache_folder() / (key_of(recipe_of(candidate)) + SUFFIX)
    write_profile(profile, path)
    forget()
    return path


def forget() -> None:
    """Lets go of what was read: files may have come since."""
    _loaded.cache_clear()
    _families.cache_clear()


def write_profile(profile: Profile, path: Path) -> None:
    """A profile as a file, the same bytes for the same profile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(zlib.compress(profile_to_json(profile).encode(), level=9))
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def cache_folder() -> Path:
    """The user's own profiles: within the user's cache by schema and libraries."""
    return _cache_folder(cache_root())


def cache_root() -> Path:
    """All that is the user's own: $PLAN_CACHE, else $XDG_CACHE_HOME/plan, else ~/.cache/plan."""
    return _cache_root(os.environ.get("PLAN_CACHE"), os.environ.get("XDG_CACHE_HOME"))


@lru_cache(maxsize=16)
def _cache_root(own: str | None, of_all: str | None) -> Path:
    return Path(own) if own else Path(of_all or Path.home() / ".cache") / "plan"


@lru_cache(maxsize=16)
def _cache_folder(root: Path) -> Path:
    return root / "profiles" / f"schema-{PROFILE_SCHEMA}" / (_installed() or "no-libraries")


def _folders() -> tuple[Path, ...]:
    """Where profiles are looked for, in this order."""
    return cache_folder(), SHIPPED


@lru_cache(maxsize=16)
def _families(folders: tuple[Path, ...]) -> dict[str, dict[str, Path]]:
    """The files of every family by regime; of two of one name the first folder's."""
    found: dict[str, dict[str, Path]] = {}
    for folder in folders:
        for path in sorted(folder.glob(f"*{SUFFIX}")):
            family, _, rest = path.name.removesuffix(SUFFIX).partition("-")
            found.setdefault(family, {}).setdefault(rest, path)
    return found


@lru_cache(maxsize=1)
def _installed() -> str:
    """The versions of the libraries that a dry run would run, empty where one of them is absent."""
    try:
        return "_".join(f"{name}-{importlib.metadata.version(name)}" for name in LIBRARIES)
    except importlib.metadata.PackageNotFoundError:
        return ""


@lru_cache(maxsize=1024)
def _loaded(path: Path) -> Profile | None:
    """The profile in a file; None where it is broken or of another schema, so that it is made anew."""
    try:
        return profile_from_json(zlib.decompress(path.read_bytes()).decode())
    except (OSError, ValueError, zlib.error, KeyError, TypeError, NoProfile):
        return None
