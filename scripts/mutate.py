"""Change one operator or constant of a formula at a time, run its tests, and write those that no test notices.

    python -m scripts.mutate [--count 120] [--seed 31] [--only loss slack]

Writes results/mutations.md, or prints it if `--only` names parts of modules' paths. A mutation is killed if a fact or a
law fails: golden files do not run. Each mutation runs in a process that is forked from one that has imported the
libraries.
"""

import argparse
import ast
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec import Struct

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "results" / "mutations.md"
SECONDS = 300  # processor time of the tests of one mutation; beyond, it counts as killed
WAIT_SECONDS = 1800  # the same for tests that wait

# Modules, by path from the repository -> the tests that state their facts and laws, the sharpest first. The first
# pattern that matches a module counts, so that one that moves within a folder keeps its tests.
ROWS = "test_emulated_rows.py"  # what PyTorch's allocator counted
STATES = ("test_states.py", "test_optimizers.py", "test_sharding.py")
TESTS: dict[str, tuple[str, ...]] = {
    "planner/confidence.py": ("test_confidence.py",),
    "planner/memory/activations.py": (ROWS, "test_activations.py", *STATES),
    "planner/memory/communication.py": ("test_sharding.py", "test_shared_rows.py", "test_zero3_streams.py", ROWS),
    "planner/memory/engine/*.py": ("test_emulated_engines.py", "test_engine.py"),
    "planner/memory/host.py": ("test_states.py", "test_evaluation.py", "test_host_memory.py"),
    "planner/memory/images/*.py": (ROWS, "test_images.py"),
    "planner/memory/generation.py": ("test_kv_cache.py", ROWS),
    "planner/memory/layers/*.py": ("test_activations.py", ROWS),
    "planner/memory/losses/formulas.py": ("test_losses.py", ROWS),
    "planner/memory/schemes/**/*.py": (
        "test_schemes.py",
        ROWS,
        "test_speeds.py",
        "test_zero3_coordinator.py",
        "test_zero3_streams.py",
        *STATES,
    ),
    "planner/memory/**/*.py": (
        "test_step.py",
        ROWS,
        *STATES,
        "test_known_stops.py",
        "test_evaluation.py",
        "test_activations.py",
    ),
    "planner/models/architectures/windows.py": ("test_windows.py", "test_models.py"),
    "planner/search/bounds.py": ("test_search.py",),
    "planner/search/search.py": ("test_search.py", "test_situations.py"),
    "planner/search/sizes.py": ("test_sizes.py",),
    "planner/throughput/communication.py": ("test_speeds.py", "test_throughput.py"),
    "planner/throughput/generation.py": ("test_speeds.py", "test_throughput.py"),
    "planner/throughput/training.py": ("test_speeds.py", "test_windows.py", "test_throughput.py", "test_images.py"),
    "planner/throughput/work.py": ("test_speeds.py", "test_windows.py", "test_throughput.py"),
}

OTHER_OPERATOR: dict[type[ast.AST], ast.AST] = {
    ast.Add: ast.Sub(), ast.Sub: ast.Add(), ast.Mult: ast.FloorDiv(), ast.Div: ast.Mult(), ast.FloorDiv: ast.Mult(),
    ast.Pow: ast.Mult(), ast.Mod: ast.FloorDiv(), ast.Lt: ast.LtE(), ast.LtE: ast.Lt(), ast.Gt: ast.GtE(),
    ast.GtE: ast.Gt(), ast.Eq: ast.NotEq(), ast.NotEq: ast.Eq(), ast.In: ast.NotIn(), ast.NotIn: ast.In(),
    ast.Is: ast.IsNot(), ast.IsNot: ast.Is(), ast.And: ast.Or(), ast.Or: ast.And(),
}  # fmt: skip
OTHER_FUNCTION = {"min": "max", "max": "min", "any": "all", "all": "any"}
# What a 0 that is a value becomes: one weight matrix of 4,096 x 4,096 in float32, about the least that a formula can
# forget. One byte more is no wrong term: the allocator counts in 512. Other constants, indices and operands grow by 1.
MATRIX_BYTES = 4096 * 4096 * 4
OPERANDS = ast.Compare | ast.BinOp | ast.Subscript | ast.Slice


def modules(only: Sequence[str] = ()) -> dict[str, tuple[str, ...]]:
    """Return the modules that have formulas, sorted by path, and their tests: those whose path has a part of `only`."""
    found: dict[str, tuple[str, ...]] = {}
    for pattern, tests in TESTS.items():
        for file in ROOT.glob(pattern):
            found.setdefault(file.relative_to(ROOT).as_posix(), tests)
    wanted = {path for path in found if not only or any(part in path for part in only)}
    return {path: found[path] for path in sorted(wanted) if mutations(path)}


class Mutation(Struct, frozen=True, kw_only=True):
    """One expression of a module, and the expression that takes its place."""

    path: str
    function: str
    line: int
    start: int  # characters from the beginning of the file
    end: int
    before: str
    after: str

    def applied(self, source: str) -> str:
        return source[: self.start] + self.after + source[self.end :]


@lru_cache
def mutations(path: str) -> tuple[Mutation, ...]:
    """Every mutation of a module's functions, in the order of the source."""
    source = (ROOT / path).read_text(encoding="utf-8")
    assert source.isascii(), f"{path}: columns are counted in bytes"
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for function in _functions(ast.parse(source)):
        for statement in function.body:
            values = _zero_values(statement)
            for node in _expressions(statement):
                for other in [ast.Constant(MATRIX_BYTES)] if node in values else _others(node):
                    start = starts[node.lineno - 1] + node.col_offset
                    end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
                    found.append(
                        Mutation(
                            path=path,
                            function=function.name,
                            line=node.lineno,
                            start=start,
                            end=end,
                            before=" ".join(source[start:end].split()),
                            after=f"({ast.unparse(other)})",
                        )
                    )
    return tuple(found)


def _functions(tree: ast.Module) -> Iterator[ast.FunctionDef]:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, ast.ClassDef):
            yield from (each for each in node.body if isinstance(each, ast.FunctionDef))


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions below a node, without annotations, messages and docstrings."""
    if isinstance(node, ast.Raise | ast.JoinedStr) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    ):
        return
    if isinstance(node, ast.expr):
        yield node
    annotation = getattr(node, "annotation", None)
    for child in ast.iter_child_nodes(node):
        if child is not annotation:
            yield from _expressions(child)


def _zero_values(statement: ast.stmt) -> set[ast.AST]:
    """The constants 0 below a statement that are no operand, index or argument of `range`."""
    found: set[ast.AST] = set()
    for parent in ast.walk(statement):
        counts = isinstance(parent, ast.Call) and isinstance(parent.func, ast.Name) and parent.func.id == "range"
        if not counts and not isinstance(parent, OPERANDS):
            found |= {each for each in ast.iter_child_nodes(parent) if _is_zero(each)}
    return found


def _is_zero(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value == 0


def _others(node: ast.expr) -> Iterator[ast.expr]:
    """The expressions that differ from a node in one operator, constant or function."""
    match node:
        case ast.BinOp(left, op, right) if type(op) in OTHER_OPERATOR:
            yield ast.BinOp(left, _other(op), right)
        case ast.Compare(left, [op, *more], others) if type(op) in OTHER_OPERATOR:
            yield ast.Compare(left, [_other(op), *more], others)
        case ast.BoolOp(op, values):
            yield ast.BoolOp(_other(op), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield operand
        case ast.IfExp(test, body, otherwise):
            yield ast.IfExp(test, otherwise, body)
        case ast.Constant(int(value) | float(value)):
            yield ast.Constant(not value if isinstance(value, bool) else value + 1)
        case ast.Call(ast.Name(name), arguments, keywords) if name in OTHER_FUNCTION:
            yield ast.Call(ast.Name(OTHER_FUNCTION[name]), arguments, keywords)


def _other(operator: ast.AST) -> Any:
    return OTHER_OPERATOR[type(operator)]


def copied(folder: Path) -> Path:
    """A copy of what the tests read."""
    for name in ("planner", "probes", "scripts", "tests", "benchmarks", "results", "docs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)
    return folder


def passes(folder: Path, tests: tuple[str, ...]) -> bool:
    """Run the tests of a copy in a forked process; return whether all pass."""
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        os.chdir(folder)
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        sys.dont_write_bytecode = True
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # pytest refuses a plugin that is imported already
        sys.path[:] = [str(folder), *(each for each in sys.path if Path(each or ".").resolve() != ROOT)]
        import pytest

        files = [f"tests/{name}" for name in tests]
        marked = ["-m", "not slow and not nightly", "-k", "not script_writes"]  # pages are golden files, too
        code = pytest.main([*files, "-x", "-q", "-p", "no:cacheprovider", *marked])
        os._exit(int(code))
    deadline = time.monotonic() + WAIT_SECONDS
    while time.monotonic() < deadline:
        finished, status = os.waitpid(child, os.WNOHANG)
        if finished:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.05)
    os.killpg(child, 9)
    os.waitpid(child, 0)
    return False


def chosen(count: int, seed: int, only: Sequence[str] = ()) -> list[Mutation]:
    """`count` mutations, as many of each module as of any other, as far as it has them."""
    decks = [list(mutations(path)) for path in modules(only)]
    for deck in decks:
        random.Random(seed).shuffle(deck)  # of its own, so that a change of one module leaves the others' mutations
    found: list[Mutation] = []
    while len(found) < count and any(decks):
        found += [deck.pop() for deck in decks if deck]
    return sorted(found[:count], key=lambda each: (each.path, each.line, each.start))


def survivors(tried: list[Mutation]) -> list[Mutation]:
    """The mutations that no test notices."""
    alive = []
    tests = modules()
    with tempfile.TemporaryDirectory() as temporary:
        folder = copied(Path(temporary))
        for name in {name: None for each in tried for name in tests[each.path]}:
            assert passes(folder, (name,)), f"{name} fails without a mutation"
        for number, each in enumerate(tried, 1):
            source = (folder / each.path).read_text(encoding="utf-8")
            (folder / each.path).write_text(each.applied(source), encoding="utf-8")
            lives = passes(folder, tests[each.path])
            (folder / each.path).write_text(source, encoding="utf-8")
            alive += [each] if lives else []
            print(
                f"{number}/{len(tried)} {'SURVIVES' if lives else 'killed'} {each.path} {each.function}: "
                f"{each.before} -> {each.after}",
                file=sys.stderr,
                flush=True,
            )
    return alive


def commit() -> str:
    """The checked-out commit, in seven digits."""
    command = ["git", "rev-parse", "--short=7", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def report(tried: list[Mutation], alive: list[Mutation], seed: int) -> str:
    rows = []
    for path in modules():
        own, left = (sum(each.path == path for each in some) for some in (tried, alive))
        if own:
            rows.append(f"| {path} | {own} | {own - left} |")
    killed = len(tried) - len(alive)
    lines = [
        "# Mutations",
        "",
        f"Measured at commit {commit()}; nothing computes these figures anew.",
        "",
        "One operator, constant, `min` or `max` of a function is changed at a time: a constant grows by 1, a 0 that is",
        "a value becomes the bytes of one matrix (64 MiB). A mutation is killed if a fact or a law fails; golden files",
        f"do not run. Written by `python -m scripts.mutate` (seed {seed}, {len(tried)} mutations):",
        f"{killed} are killed, {killed / len(tried):.0%}.",
        "",
        "| module | mutations | killed |",
        "| --- | ---: | ---: |",
        *rows,
        "",
        "## Survivors",
        "",
        *(f"- {each.path}, `{each.function}`: `{each.before}` -> `{each.after}`" for each in alive),
    ]
    return "\n".join(lines if alive else [*lines, "None."]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=120)
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--only", nargs="*", default=(), help="parts of modules' paths")
    options = parser.parse_args()
    import transformers  # noqa: F401  so that the forks need not
    import trl  # noqa: F401

    tried = chosen(options.count, options.seed, options.only)
    alive = survivors(tried)
    text = report(tried, alive, options.seed)
    if options.only:
        print(text)
    else:
        REPORT.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
