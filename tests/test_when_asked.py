"""Modules that come when asked are the modules themselves from then on, and a dry run that leaves them out is the same dry run."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from probes.when_asked.module import ModuleWhenAsked, call, stand_in

pytest.importorskip("trl")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package that takes long to import."""
    folder = tmp_path / "slow_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("from slow_package.part import number\nname = 'real'\nclass Thing: pass\n")
    (folder / "part.py").write_text("import slow_package\nnumber = 7\n")
    (folder / "wrong.py").write_text("early = 1\nraise OSError('no such device')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("slow_package", "slow_package.part", "slow_package.wrong"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return "slow_package"


def test_a_module_stands_in_until_something_else_is_asked_for(package: str) -> None:
    module = stand_in(package, ModuleWhenAsked)
    assert module is not None and stand_in(package, ModuleWhenAsked) is None and stand_in("no_such_package", ModuleWhenAsked) is None
    module.add_names({"name": "stand-in"})
    scope: dict[str, object] = {}
    exec("from slow_package import name\nimport slow_package", scope)
    assert scope["name"] == "stand-in" and scope["slow_package"] is module and not hasattr(module, "__no_such__")
    assert f"{package}.part" not in sys.modules
    exec("from slow_package import Thing, name, number", scope)
    assert scope["name"] == "real" and scope["number"] == 7
    assert type(module) is type(sys) and sys.modules[package] is module and module.Thing is scope["Thing"]
    with pytest.raises(AttributeError):
        _ = module.other


def test_a_module_of_a_package_brings_the_package(package: str) -> None:
    module = stand_in(package, ModuleWhenAsked)
    assert module is not None
    assert importlib.import_module(f"{package}.part").number == 7
    assert type(module) is type(sys) and module.name == "real" and call(module, "Thing").__class__ is module.Thing


def test_a_module_that_cannot_be_imported_can_be_asked_again(package: str) -> None:
    importlib.import_module(package)
    module = stand_in(f"{package}.wrong", ModuleWhenAsked)
    assert module is not None
    module.add_names({"early": 0})
    for _ in range(2):
        with pytest.raises(OSError, match="no such device"):
            _ = module.late
        assert isinstance(module, ModuleWhenAsked) and module.early == 0


TRACES = """
import json, sys
{first}
from itertools import accumulate
from planner.candidate import Candidate
from probes.simulate import dry_run
from tests.test_dryrun import candidate
cases = [candidate("grpo", tuning="lora", padded=False), candidate("sft", tuning="full", precision="bf16", dtype="float32"),
         candidate("dpo", tuning="lora", lora_dropout=0.1), candidate("online-dpo", tuning="lora"),
         candidate("sft", tuning="lora", attn_implementation="eager", optim="adafactor")]
def told(trace):
    # Every birth and what is alive after it. Deaths that come at once, as where autocast drops its copies, come in any order.
    after = accumulate(size_bytes for _, size_bytes in trace.events)
    alive = [total for total, (_, size_bytes) in zip(after, trace.events) if size_bytes > 0]
    return [(made.size_bytes, made.phase, made.component, made.operator, made.module, total) for made, total in zip(trace.allocations, alive)]
answer = {{"traces": [told(dry_run(case)) for case in cases], "imported": len(sys.modules),
          "left_out": [name for name in {left_out} if name not in sys.modules]}}
{last}
print(json.dumps(answer, default=str))
"""
LEFT_OUT = ["torch._dynamo.convert_frame", "sympy.core", "torch.distributed.tensor._api", "torch.distributed.fsdp.api", "torch.distributed.checkpoint.api"]
PLANS_ONLY = "from planner.ahead import this_process_only_plans\nthis_process_only_plans()"
# What was left out can be had afterwards, and is whole.
AFTERWARDS = """
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols as early_free, guard_or_false as early_guard
import sympy, torch
placeholder = torch.distributed.tensor.DTensor
assert not isinstance(torch.ones(2), placeholder)
from torch.distributed.tensor import DTensor, Replicate
held = vars(sys.modules["torch.distributed.fsdp"]).get("FullyShardedDataParallel")
assert held is None or issubclass(held, torch.nn.Module), "who imports one of them gets no placeholder of another"
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, StateDictType
assert DTensor is not placeholder and DTensor.__module__ == "torch.distributed.tensor" and issubclass(DTensor, torch.Tensor)
assert issubclass(FullyShardedDataParallel, torch.nn.Module) and torch.distributed.fsdp.FSDPModule is FSDPModule
assert sympy.Symbol("x") + 1 - 1 == sympy.Symbol("x") and isinstance(sympy.Symbol("x"), sympy.Basic)
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols, guard_or_false, sym_eq
def unbacked():
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        return mode.from_tensor(torch.ones(3)).nonzero().size(0)
size = unbacked()
assert isinstance(size, torch.SymInt) and not guard_or_false(size == 5) and guard_or_false(True) and len(free_unbacked_symbols(size)) == 1
assert early_guard is not guard_or_false and early_guard(True) and not early_guard(size == 5) and len(early_free(size)) == 1
assert isinstance(sym_eq((size, 2), (size, 2)), (bool, torch.SymBool)) and sym_eq((1, 2), (1, 2)) is True
"""


def told(first: str, last: str = "") -> dict[str, object]:
    script = TRACES.format(first=first, last=last, left_out=LEFT_OUT)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_a_dry_run_is_the_same_without_what_it_leaves_out() -> None:
    """With everything imported before it, in a process that may train afterwards, and in one that only plans."""
    everything = "import torch._dynamo, torch.distributed.tensor, torch.distributed.fsdp, sympy, transformers, trl, trl.trainer.grpo_trainer"
    plain, quick, plans_only = told(everything), told(""), told(PLANS_ONLY, AFTERWARDS)
    assert plain["traces"] == quick["traces"] == plans_only["traces"]
    assert plain["left_out"] == [] and plans_only["left_out"] == LEFT_OUT and quick["left_out"] == LEFT_OUT[:1]
    assert plans_only["imported"] < quick["imported"] < plain["imported"]  # type: ignore[operator]


TRUTHS: list[tuple[object, ...]] = [(True,), (False,)]
NUMBERS: list[tuple[object, ...]] = [(0,), (3,), (-1,)]
SEVERAL: list[tuple[object, ...]] = [*TRUTHS, (True, False), (True, True), (False, False, True)]
PAIRS: list[tuple[object, ...]] = [(2, 2), (2, 3), ((1, 2), (1, 2)), ((1, 2), (1, 3)), ((1,), (1, 2)), ((), ())]
QUESTIONS = {
    "guard_int": NUMBERS, "guarding_hint_or_throw": [*TRUTHS, *NUMBERS], "has_guarding_hint": [*TRUTHS, *NUMBERS], "is_nested_int": NUMBERS,
    "has_free_symbols": [*TRUTHS, *NUMBERS], "sym_and": SEVERAL, "sym_or": SEVERAL, "sym_eq": PAIRS,
}  # fmt: skip


def test_what_symbolic_shapes_say_of_numbers_is_what_they_would_say() -> None:
    from probes.when_asked.symbols import ANSWERS, SYMBOLS

    real = importlib.import_module(SYMBOLS)
    assert real.ShapeEnv and not isinstance(real, ModuleWhenAsked)
    for name, answer in ANSWERS.items():
        for question in QUESTIONS.get(name, TRUTHS):
            expected = getattr(real, name)(*question)
            assert answer(*question) == expected and type(answer(*question)) is type(expected), (name, question)
