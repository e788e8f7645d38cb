"""Mutations of the formulas: each is another program, and the choice of them is the same each time."""

import ast
from collections import Counter
from pathlib import Path

import pytest

from scripts.mutate import ROOT, TESTS, chosen, modules, mutations

MODULES = modules()


@pytest.mark.parametrize("path", MODULES)
def test_each_mutation_is_another_program(path: str) -> None:
    source = (ROOT / path).read_text(encoding="utf-8")
    tree = ast.dump(ast.parse(source))
    for each in mutations(path)[::10]:
        assert ast.dump(ast.parse(each.applied(source))) != tree


@pytest.mark.parametrize("tests", TESTS.values())
def test_the_tests_of_a_module_exist(tests: tuple[str, ...]) -> None:
    assert all((ROOT / "tests" / name).is_file() for name in tests)


def test_every_module_has_its_share() -> None:
    tried = chosen(2 * len(MODULES), 31)
    assert tried == chosen(2 * len(MODULES), 31)
    assert set(Counter(each.path for each in tried).values()) == {2}


def test_messages_and_annotations_stay() -> None:
    befores = {each.before for path in MODULES for each in mutations(path)}
    assert "int | None" not in befores
    assert not any('"""' in before for before in befores)


def test_a_zero_becomes_a_matrix_unless_it_is_an_index_or_an_operand() -> None:
    after = {(each.function, each.before, each.after) for each in mutations("planner/memory/optimizer.py")}
    assert ("optimizer_states_bytes", "0", f"({4096 * 4096 * 4})") in after
    after = {(each.function, each.before, each.after) for each in mutations("planner/memory/step.py")}
    assert ("layer_of_most_gathered", "0", f"({4096 * 4096 * 4})") in after
    assert ("head_backward", "0", "(1)") in after  # of [0]


def test_a_module_that_moves_within_a_folder_keeps_tests() -> None:
    assert MODULES["planner/memory/step.py"] == TESTS["planner/memory/**/*.py"]
    assert all(any(Path(path).match(pattern) for path in MODULES) for pattern in TESTS if "**" not in pattern)
