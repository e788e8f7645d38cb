"""Citations in planner/ and probes/: a library's file and symbol, such as "trl 1.16, trainer/utils.py, `pad`"."""

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = ("trl", "transformers", "peft", "accelerate", "deepspeed", "bitsandbytes", "safetensors", "torch")
NOT_INSTALLED = ("vllm", "torchao", "galore-torch", "schedulefree", "grokadamw", "lomo-optim", "torch-optimi")
# "trl 1.16", as the release of the citations behind it.
RELEASE = re.compile(rf"\b({'|'.join((*LIBRARIES, *NOT_INSTALLED, 'pytorch'))})[ /](?:(\d+\.\d+)(?:\.\d+)?)?")
# A file and the symbol behind it: "trainer/utils.py, `pad`", "nn.py `Linear`", "nn.py (`Linear`: ..)".
CITATION = re.compile(r"([\w./]*\w\.py)[,:]? \(?`([A-Za-z_][\w.]*)`")
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
def modules(package: Path) -> dict[str, list[Path]]:
    """The modules below a package's folder by file name."""
    found: dict[str, list[Path]] = {}
    for path in package.rglob("*.py"):
        found.setdefault(path.name, []).append(path)
    return found


def matching(package: Path, file: str) -> list[Path]:
    """The modules below a package's folder that a citation of `file` can mean."""
    ends = tuple(Path(file).parts)
    return [path for path in modules(package).get(ends[-1], []) if path.parts[-len(ends) :] == ends]


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


def cited() -> Iterator[tuple[str, str, str, str, str]]:
    """(Module, library, release, file, symbol) of each citation of the project."""
    for path in SOURCES:
        yield from ((path.relative_to(ROOT).as_posix(), *each) for text in texts(path) for each in citations(text))


def definitions(path: Path, symbol: str) -> list[str]:
    """Return the code of what a module defines by this name, without docstrings and comments: nothing for an attribute.

    A plain name is looked for inside classes too.
    """
    found = []
    for node, name in defined(ast.parse(path.read_text(encoding="utf-8")), ""):
        if name == symbol or name.endswith(f".{symbol}"):
            found.append(ast.unparse(without_docstrings(node)))
    return found


def defined(node: ast.AST, outer: str) -> Iterator[tuple[ast.AST, str]]:
    """Yield the classes, functions and assigned names below a node, with their dotted names."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            name = f"{outer}.{child.name}".lstrip(".")
            yield child, name
            yield from defined(child, name)
        elif isinstance(child, ast.Assign | ast.AnnAssign):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            yield from ((child, f"{outer}.{each.id}".lstrip(".")) for each in targets if isinstance(each, ast.Name))
        else:
            yield from defined(child, outer)


def without_docstrings(node: ast.AST) -> ast.AST:
    """Return the node with the docstrings below it taken away; it is changed in place."""
    for each in ast.walk(node):
        if isinstance(each, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(each):
            each.body = each.body[1:] or [ast.Pass()]
    return node
