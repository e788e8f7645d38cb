"""The reports of PyTorch's CPU allocator: equal to a count of its blocks from below PyTorch."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

import torch

from probes.worker.allocator_events import AllocatorEvents, DeviceFull

COUNTER = Path(__file__).parent / "data" / "count_allocations.c"
MIB = 2**20
# A step of a small model, alone and while the reports are recorded; prints both peaks of the counter and the reports'.
STEP = """
import ctypes, gc, json
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from probes.worker.allocator_events import AllocatorEvents

torch.set_num_threads(1)
counter = ctypes.CDLL(None)
counter.held_bytes.restype = counter.peak_bytes.restype = ctypes.c_long
model = Qwen2ForCausalLM(Qwen2Config(vocab_size=640, hidden_size=64, intermediate_size=176, num_hidden_layers=2))
tokens = torch.randint(0, 640, (4, 128))

def step():
    logits = model(input_ids=tokens).logits
    (logits.gather(-1, tokens.unsqueeze(-1)) - logits.logsumexp(-1, keepdim=True)).mean().backward()
    model.zero_grad(set_to_none=True)

def counted_peak():
    counter.reset_peak()
    before = counter.held_bytes()
    yield
    yield counter.peak_bytes() - before

step(); gc.collect(); gc.disable()
alone = counted_peak(); next(alone); step()
recorded, events = counted_peak(), AllocatorEvents(); next(recorded)
with events.recording(0):
    step()
print(json.dumps([next(alone), next(recorded), events.peaks["load"]]))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="the counter is compiled")
def test_reports_equal_a_count_below_pytorch_and_recording_changes_nothing(tmp_path: Path) -> None:
    library = tmp_path / "count.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, COUNTER, "-ldl", "-lpthread"], check=True)
    step = subprocess.run(
        [sys.executable, "-c", STEP],
        env={**os.environ, "LD_PRELOAD": str(library)},
        capture_output=True,
        text=True,
        check=True,
    )
    alone, recorded, reported = json.loads(step.stdout.splitlines()[-1])
    assert alone == recorded == reported > 10 * MIB


def test_peaks_are_counted_in_the_phase_that_runs() -> None:
    events = AllocatorEvents()
    with events.recording(1000):
        first = torch.empty(MIB, dtype=torch.uint8)
        events.begin("forward")
        second = torch.empty(2 * MIB, dtype=torch.uint8)
        del first, second
        events.begin("backward")
    assert events.peaks == {"load": 1000 + MIB, "forward": 1000 + 3 * MIB, "backward": 1000}


def test_releases_of_blocks_from_before_do_not_count() -> None:
    events = AllocatorEvents()
    older = torch.empty(MIB, dtype=torch.uint8)
    with events.recording(MIB):
        del older
        newer = torch.empty(MIB, dtype=torch.uint8)
    assert events.peaks == {"load": 2 * MIB}
    del newer


def test_the_first_allocation_above_the_limit_is_named() -> None:
    events = AllocatorEvents(capacity_bytes=3 * MIB)
    with pytest.raises(DeviceFull) as short, events.recording(MIB):
        events.begin("forward")
        held = torch.empty(MIB, dtype=torch.uint8)
        events.begin("backward")
        more = torch.empty(4 * MIB, dtype=torch.uint8)
        del held, more
    assert (short.value.phase, short.value.tried_bytes, short.value.held_bytes) == ("backward", 4 * MIB, 2 * MIB)
