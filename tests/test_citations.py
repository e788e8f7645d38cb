"""Citations name a library's file and symbol: each symbol is looked up in the installed library."""

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("trl", "transformers", "peft", "accelerate", "deepspeed", "bitsandbytes", "safetensors", "torch")
NOT_INSTALLED = ("vllm", "torchao", "galore-torch", "schedulefree", "grokadamw", "lomo-optim", "torch-optimi")
# "trl 1.16", as the release of the citations behind it.
RELEASE = re.compile(rf"\b({'|'.join((*LIBRARIES, *NOT_INSTALLED, 'pytorch'))})[ /](?:(\d+\.\d+)(?:\.\d+)?)?")
# A file and the symbol behind it: "trainer/utils.py, `pad`", "nn.py `Linear`", "nn.py (`Linear`: ..)".
CITATION = re.compile(r"([\w./]*\w\.py)[,:]? \(?`([A-Za-z_][\w.]*)`")
NUMBERED = re.compile(r"\w\.(?:py|h|cu|cpp|cuh):\d+")
SOURCES = sorted(path for package in ("planner", "probes") for path in (ROOT / package).rglob("*.py"))


def texts(path: Path) -> Iterator[str]:
    """The docstrings, the blocks of comments and the arguments `source` of a module, each on one line."""
    block: list[str] = []
    last = 0
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                if token.start[0] != last + 1 and block:
                    yield " ".join(block)
                    block = []
                block.append(token.string.lstrip("# "))
                last = token.start[0]
    yield " ".join(block)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.keyword) and node.arg == "source" and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield " ".join((ast.get_docstring(node) or "").split())


def citations(text: str) -> Iterator[tuple[str, str, str, str]]:
    """(Library, release, file, symbol) of each citation; "" for a library or release that the text does not name."""
    library = release = ""
    found = [*RELEASE.finditer(text), *CITATION.finditer(text)]
    for match in sorted(found, key=lambda each: each.start()):
        if match.re is RELEASE:
            named = "torch" if match[1] == "pytorch" else match[1]
            library, release = named, match[2] or (release if named == library else "")
        else:
            yield library, release, match[1], match[2]


@cache
def files(library: str) -> dict[str, list[Path]]:
    """The installed modules of a library by name."""
    spec = find_spec(library)
    found: dict[str, list[Path]] = {}
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(folder).rglob("*.py"):
            found.setdefault(path.name, []).append(path)
    return found


@cache
def symbols(path: Path) -> frozenset[str]:
    """Names of a module: dotted ones of classes and functions, and every plain name, attribute and text."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(name for node in ast.walk(tree) for name in plain_names(node)) | frozenset(dotted_names(tree, ""))


def plain_names(node: ast.AST) -> Iterator[str]:
    """The names that a node gives or reads."""
    for field in ("id", "attr", "arg", "name", "asname", "value"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield value


def dotted_names(node: ast.AST, outer: str) -> Iterator[str]:
    """The names of the classes and functions below a node, with those around them."""
    for child in ast.iter_child_nodes(node):
        inner = outer
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            inner = f"{outer}.{child.name}".lstrip(".")
            yield inner
        yield from dotted_names(child, inner)


def has(symbol: str, names: frozenset[str]) -> bool:
    """Return whether a module has a symbol; of an attribute of another module or of an object, each part."""
    return symbol in names or ("." in symbol and all(part in names for part in symbol.split(".")))


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
    ends = tuple(Path(file).parts)
    paths = [path for each in named for path in files(each).get(ends[-1], [])]
    return [path for path in paths if path.parts[-len(ends) :] == ends]


CITED = [
    (path.relative_to(ROOT).as_posix(), *each) for path in SOURCES for text in texts(path) for each in citations(text)
]


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
    for module, library, release, file, symbol in CITED:
        paths = looked_up(library, release, file)
        if paths and not any(has(symbol, symbols(path)) for path in paths):
            missing.append(f"{module}: {library} {release} {file} {symbol}")
        found += bool(paths)
    assert missing == []
    assert found > MOST_OF_THEM


MOST_OF_THEM = 300  # of the citations are of libraries and releases that the tests install
