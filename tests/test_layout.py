"""The layout of the two packages: who imports whom, how many files a folder holds, and that no library is patched."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("planner", "probes")
PATHS = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


@cache
def tree_of(module: str) -> ast.Module:
    """The syntax tree of a module of the project."""
    return ast.parse(PATHS[module].read_text(), str(PATHS[module]))


# Beside `__init__.py`.
MOST_MODULES = 15
MOST_ROOT_MODULES = 14

# Modules at the root of `planner/` that count as one part; every other root module is a part of its own. The widths of
# dtypes are read by every formula.
ROOT_PARTS = {
    "errors": "basics", "units": "basics", "memory.dtypes": "basics", "quantizations": "basics",
    "candidate": "words", "methods": "words", "optimizers": "words", "schemes": "words", "settings": "words",
    "quantities": "words", "cache_keys": "words",
    "confidence": "estimation",
}  # fmt: skip

# Part -> the parts that it may import, in functions too. From the bottom to the top: a part imports only parts above it
# in this table. `memory/*` are four folders inside `memory/`; `planner` and `probes` are the two `__init__.py`.
ALLOWED = {
    "basics": "",
    "files": "basics",
    "models": "basics files",
    "gpus": "basics files",
    "rows": "basics files",
    "words": "basics models rows",
    "jobs": "basics rows words models gpus files",
    "memory/parameters": "basics words models gpus",
    "memory/layers": "basics words models gpus",
    "memory/losses": "basics words memory/layers",
    "memory/engine": "basics words models gpus",
    "memory": "basics words models gpus memory/parameters memory/layers memory/losses memory/engine",
    "throughput": "basics rows words models gpus memory memory/losses memory/parameters",
    "launch": "basics words models gpus jobs files",
    "estimation": "basics words gpus memory memory/engine throughput",
    "search": "basics rows words models gpus jobs memory/engine throughput estimation",
    "planning": "basics words gpus jobs memory/engine estimation search",
    "measurements": "basics rows words models gpus files jobs memory estimation planning",
    "diagnose": "basics words gpus files jobs estimation search planning",
    "report": (
        "basics rows words models gpus files jobs launch estimation search planning measurements diagnose"
    ),
    "requests": "basics words models gpus files jobs launch search report",
    "probes/substitution": "",
    "probes/task": "basics words measurements",
    "probes/emulated_gpu": "basics gpus files memory probes/substitution probes/task",
    "probes/step": "basics words probes/substitution",
    "probes/processors": "basics words models",
    "probes/trainers": "basics words models jobs probes/step probes/processors probes/substitution",
    "probes/row_counts": "basics",
    "probes/layers": "basics words models files memory/layers probes/substitution probes/step probes/trainers",
    "probes/worker": (
        "basics words models jobs launch measurements probes/task probes/substitution probes/emulated_gpu probes/step "
        "probes/processors probes/trainers probes/layers"
    ),
    "probes/runner": (
        "basics words gpus files jobs memory memory/parameters launch estimation measurements probes/task "
        "probes/emulated_gpu"
    ),
    "probes/study": "basics words models gpus files jobs memory estimation search planning measurements",
    "probes/callback": "basics words models gpus jobs estimation planning measurements requests probes/runner",
    "probes": "probes/callback",
    "training_stack": (
        "basics words models gpus files jobs memory memory/layers estimation search planning measurements "
        "report probes/row_counts probes/callback probes/emulated_gpu probes/layers probes/runner "
        "probes/study"
    ),
    "ask": (
        "basics words models gpus jobs estimation search planning measurements diagnose report requests "
        "training_stack"
    ),
    "notebook": (
        "basics words models gpus files jobs launch estimation search planning report requests training_stack ask"
    ),
    "serve": "basics rows words models gpus files jobs planning diagnose report requests training_stack ask",
    "mcp": "basics words files jobs launch planning diagnose report requests training_stack ask",
    "commands": (
        "basics rows words models gpus files jobs launch planning measurements diagnose report requests training_stack "
        "ask serve mcp"
    ),
    "planner": "basics files words models gpus jobs estimation planning report notebook",
}  # fmt: skip


def part(module: str) -> str:
    """The part of the table that a module belongs to."""
    package, *inside = module.split(".")
    if not inside:
        return package
    if package == "probes":
        return f"probes/{inside[0]}"
    if inside[0] == "memory" and len(inside) == 3 and inside[1] not in ("images", "schemes"):  # formulas of `memory`
        return f"memory/{inside[1]}"
    return ROOT_PARTS.get(".".join(inside[:2]), ROOT_PARTS.get(inside[0], inside[0]))


def imported_names(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """The name that each import binds and the dotted name of the module or object behind it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((name.asname or name.name.split(".")[0], name.name) for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are not used here"
            yield from ((name.asname or name.name, f"{node.module}.{name.name}") for name in node.names)


def imported_modules(module: str) -> set[str]:
    """The project's modules that a module imports anywhere, inside functions too."""
    names = {name for _, name in imported_names(tree_of(module)) if name.split(".")[0] in PACKAGES}
    return {name if name in PATHS else name.rpartition(".")[0] for name in names}


@cache
def all_imports() -> dict[str, set[str]]:
    """The project's modules that each of its modules imports."""
    return {module: imported_modules(module) for module in PATHS}


def test_every_import_of_the_project_is_a_file_of_it() -> None:
    assert set().union(*all_imports().values()) <= set(PATHS)


def test_no_file_imports_itself_through_others() -> None:
    list(TopologicalSorter(all_imports()).static_order())  # raises CycleError, which names the circle


def test_the_table_of_allowed_imports_runs_downwards_only() -> None:
    parts = list(ALLOWED)
    for index, name in enumerate(parts):
        assert set(ALLOWED[name].split()) <= set(parts[:index]), name


def test_a_file_imports_only_what_its_folder_may() -> None:
    forbidden = {
        (module, imported)
        for module in PATHS
        for imported in all_imports()[module]
        if part(imported) not in {part(module), *ALLOWED[part(module)].split()}
    }
    assert forbidden == set()


def test_only_the_training_stack_imports_the_probes() -> None:
    importers = {
        module
        for module, imported in all_imports().items()
        if module.startswith("planner") and any(name.startswith("probes") for name in imported)
    }
    assert importers == {"planner.training_stack"}


def test_only_the_command_knows_typer() -> None:
    typed = re.compile(r"^\s*(?:from|import) typer\b", re.MULTILINE)
    importers = {module for module, path in PATHS.items() if typed.search(path.read_text())}
    assert {".".join(module.split(".")[:2]) for module in importers} == {"planner.commands"}


def test_nothing_stands_on_the_command() -> None:
    outside = [module for module in PATHS if part(module) != "commands"]
    assert [module for module in outside if any(part(name) == "commands" for name in all_imports()[module])] == []


# Functions of `planner.units` that make text of numbers; sentences are made in `report`.
FORMATTING = re.compile(r"planner\.units\.format_")


def test_the_search_and_the_plan_make_no_sentences() -> None:
    makers = {module for module in PATHS for _, name in imported_names(tree_of(module)) if FORMATTING.match(name)}
    assert {module for module in makers if part(module) in ("search", "planning")} == set()


def test_the_tools_of_agents_know_no_protocol() -> None:
    importers = {
        module
        for module in PATHS
        if re.search(r"^\s*(?:from|import) mcp(?:_types)?\b", PATHS[module].read_text(), re.MULTILINE)
    }
    assert importers == {"planner.mcp.server"}


# Libraries of extras that a notebook alone needs: the one module that imports each, inside a function.
OF_NOTEBOOKS = {"plotly": "planner.notebook.figures", "pandas": "planner.report.frame"}


def test_libraries_of_notebooks_are_imported_by_one_module_each_when_called() -> None:
    for library, only in OF_NOTEBOOKS.items():
        called = {module for module, path in PATHS.items() if f'import_module("{library}' in path.read_text()}
        typed = re.compile(rf"^(?:from|import) {library}\b", re.MULTILINE)  # inside `if TYPE_CHECKING` it is indented
        assert called == {only}
        assert {module for module, path in PATHS.items() if typed.search(path.read_text())} == set()


def test_no_folder_holds_more_modules_than_one_sees_at_a_glance() -> None:
    counts = Counter(path.parent for path in PATHS.values() if path.name != "__init__.py")
    assert counts[ROOT / "planner"] <= MOST_ROOT_MODULES
    assert max(counts.values()) <= MOST_MODULES


# -- libraries are used as they are ------------------------------------------------------------------------------------

# Import hooks, the priority of our process, an exit without clean-up, a frozen garbage collector, stand-ins of tests.
TRICKS = re.compile(r"sys\.meta_path|exec_module|os\.nice|os\._exit|gc\.freeze|unittest\.mock")


def test_no_file_plays_tricks_with_the_interpreter() -> None:
    assert {module for module, path in PATHS.items() if TRICKS.search(path.read_text())} == set()


# The only module that sets attributes of libraries: the substitution of CUDA kernels that the CPU has not.
SUBSTITUTION = "probes.substitution"
SETTERS = ("setattr", "delattr", "object.__setattr__", "type.__setattr__")


def changed_objects(tree: ast.AST) -> Iterator[ast.expr]:
    """The objects whose attributes are set or deleted: `a.b` for `a.b.c = 1` and for `setattr(a.b, "c", 1)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in SETTERS and node.args:
            yield node.args[0]


def first_name(expression: ast.expr) -> str:
    """The variable that a chain of attributes and subscripts starts with; "" where it starts otherwise."""
    while isinstance(expression, ast.Attribute | ast.Subscript):
        expression = expression.value
    return expression.id if isinstance(expression, ast.Name) else ""


def foreign_objects_changed(tree: ast.AST) -> list[str]:
    """The objects of `changed_objects` that come from a library."""
    foreign = {bound for bound, name in imported_names(tree) if name.split(".")[0] not in PACKAGES}
    return [ast.unparse(changed) for changed in changed_objects(tree) if first_name(changed) in foreign]


def test_no_attribute_of_an_imported_library_is_set() -> None:
    changed = {module: foreign_objects_changed(tree_of(module)) for module in set(PATHS) - {SUBSTITUTION}}
    assert {module: objects for module, objects in changed.items() if objects} == {}


def test_a_set_attribute_of_a_library_would_be_found() -> None:
    code = (
        "import torch\n"
        "from torch import nn as layers\n"
        "from planner import units\n"
        "torch.cuda.x = 1\n"
        "layers.Linear.y += 1\n"
        "setattr(torch, 'z', 1)\n"
        "units.x = ours.y = 1\n"
    )
    assert foreign_objects_changed(ast.parse(code)) == ["torch.cuda", "layers.Linear", "torch"]


def test_releases_of_vllm_are_named_in_their_table_alone() -> None:
    """The rows of model types, of tools, of methods (`first_trl`) and of older releases of TRL have others."""
    own = ("settings.vllm_releases", "settings.tools", "requests.file_keys", "diagnose", "models", "methods")
    found = [
        (module, node.value)
        for module in PATHS
        if not module.startswith(tuple(f"planner.{each}" for each in own))
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"vllm==.+|0\.[1-3]\d", node.value)
    ]
    assert not found


def test_a_scheme_and_a_precision_are_asked_as_one_for_casts() -> None:
    """`Candidate.casts` is "nothing" without mixed precision."""
    for module in PATHS:
        for node in ast.walk(tree_of(module)):
            if isinstance(node, ast.BoolOp):
                words = ast.unparse(node)
                assert not ("scheme_row.casts" in words and re.search("precision [!=]= 'no'", words)), (module, words)
