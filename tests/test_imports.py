"""Imports that come quickly leave the same modules as others do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

SCRIPT = """
import json, sys
{first}
import torch, transformers
from transformers import masking_utils
from trl import import_utils
answer = {{"names": sorted(transformers._class_to_module.items()), "distributions": import_utils.PACKAGE_DISTRIBUTION_MAPPING,
          "compiler": "torch._dynamo.convert_frame" in sys.modules}}
{last}
print(json.dumps(answer))
"""
QUICKLY = "from probes.imports import quick_imports\nwith quick_imports():\n    import transformers, trl, peft.utils"

ONE_CORE = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"


def answer(first: str = "", last: str = "") -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(first=first, last=last)], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr
    told: dict[str, object] = json.loads(done.stdout)
    return told


def test_quick_imports_import_what_others_do() -> None:
    plain, quick, alone = answer(), answer(QUICKLY), answer(f"{ONE_CORE}\n{QUICKLY}")
    assert plain["names"] == quick["names"] == alone["names"] and len(plain["names"]) > 3000  # type: ignore[arg-type]
    assert plain["distributions"] == quick["distributions"] == alone["distributions"]
    assert plain["compiler"] and not quick["compiler"]


READ = """
from probes.imports import _read_from_files
distributions, structures = _read_from_files(elsewhere=True)
assert "torch" in distributions and "transformers.utils.hub" not in sys.modules and "torch" not in sys.modules
(folder, names), = structures.items()
assert folder.endswith("models") and len(names) > 300
sys.exit(0)
"""


def test_what_is_read_from_files_is_read_without_the_libraries() -> None:
    done = subprocess.run([sys.executable, "-c", f"import sys\n{READ}"], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr


MADE_MEANWHILE = """
import dataclasses, inspect, sys
before = dataclasses._repr_fn, dataclasses._cmp_fn, inspect.getmodule
from probes.imports import quick_imports
with quick_imports():
    import torch
    within = inspect.getmodule(sys._getframe()), inspect.getmodule(inspect.signature)

    @dataclasses.dataclass(order=True)
    class Point:
        x: int
        y: list = dataclasses.field(default_factory=list)

    @torch.library.custom_op("plan_test::doubled", mutates_args=())
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda context, gradient: 2 * gradient)
assert (dataclasses._repr_fn, dataclasses._cmp_fn, inspect.getmodule) == before
assert within == (sys.modules["__main__"], inspect)
for _ in range(2):
    assert repr(Point(1)) == "Point(x=1, y=[])" and Point(1) == Point(1) != Point(2) and Point(1) < Point(2) and Point(1) != 1
point = Point(1)
point.y.append(point)
assert repr(point) == "Point(x=1, y=[...])"
for _ in range(2):
    weight = torch.ones(3, requires_grad=True)
    doubled(weight).sum().backward()
    assert weight.grad.tolist() == [2.0] * 3
sys.exit(0)
"""


def test_what_is_made_meanwhile_is_as_ever() -> None:
    done = subprocess.run([sys.executable, "-c", MADE_MEANWHILE], capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr


COMPILED = """
import torch
from torch._dynamo.testing import CompileCounter

@torch.compiler.disable
def left_alone(x):
    return x + 1

counter = CompileCounter()
compiled = torch.compile(lambda x: left_alone(x * 2) * 3, backend=counter)
answer = {"result": compiled(torch.ones(2)).tolist(), "graphs": counter.frame_count}
"""
BEFORE = """
import torch
marked = torch._dynamo.allow_in_graph(torch._dynamo.assume_constant_result(lambda: 1))
early = torch.compiler.disable(lambda x: x + 1)
assert early(1) == 2 and torch._dynamo.graph_break() is None and torch._dynamo.config.recompile_limit > 0
assert "torch._dynamo.convert_frame" not in __import__("sys").modules
"""
AFTER = """
assert type(torch._dynamo).__name__ == "module" and marked._dynamo_marked_constant
assert id(marked) in torch._dynamo.trace_rules._allowed_callable_ids and early(1) == 2
counter = CompileCounter()
assert torch.compile(lambda x: early(x * 2) * 3, backend=counter)(torch.ones(2)).tolist() == [9.0, 9.0]
assert counter.frame_count == 2
"""


def test_the_compiler_is_the_same_when_it_comes_late() -> None:
    plain = answer(last=COMPILED)
    assert plain == answer(QUICKLY + BEFORE, last=COMPILED + AFTER) == {"result": [9.0, 9.0], "graphs": 2}
