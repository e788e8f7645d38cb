"""Citations name a library's file and symbol: each symbol is looked up in the installed library."""

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

from scripts.citations import LIBRARIES, NOT_INSTALLED, ROOT, SOURCES, cited, has, matching, symbols

NUMBERED = re.compile(r"\w\.(?:py|h|cu|cpp|cuh):\d+")


def packages(library: str) -> Iterator[Path]:
    """Yield the folder of an installed library."""
    spec = find_spec(library)
    yield from map(Path, (spec.submodule_search_locations or []) if spec else [])


def installed(library: str, release: str) -> bool:
    """Return whether the release that a citation names is the installed one."""
    try:
        return not release or version(library).startswith(release + ".")
    except PackageNotFoundError:
        return False


def looked_up(library: str, release: str, file: str) -> list[Path]:
    """The installed files that a citation can mean; empty if its library or release is not installed."""
    if library in NOT_INSTALLED or (library and not installed(library, release)):
        return []
    named = [library] if library else LIBRARIES
    return [path for each in named for package in packages(each) for path in matching(package, file)]


def test_no_citation_has_a_line_number() -> None:
    numbered = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in SOURCES
        if "diagnose" not in path.parts  # reads the numbers of tracebacks
        for match in NUMBERED.finditer(path.read_text(encoding="utf-8"))
    ]
    assert numbered == []


@pytest.mark.slow
def test_every_symbol_is_in_the_installed_library() -> None:
    pytest.importorskip("trl")
    found, missing = 0, []
    for module, library, release, file, symbol in cited():
        paths = looked_up(library, release, file)
        if paths and not any(has(symbol, symbols(path)) for path in paths):
            missing.append(f"{module}: {library} {release} {file} {symbol}")
        found += bool(paths)
    assert missing == []
    assert found > MOST_OF_THEM


MOST_OF_THEM = 300  # of the citations are of libraries and releases that the tests install
