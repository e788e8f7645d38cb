"""The worker of a growth run: `python -m scripts.growth_worker TASK.json`, a probe's worker that records every step.

Each rank writes a line of JSON for each optimizer step to a file in the folder that `RECORD` names: see `Recorder`.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from planner.measurements.measurement import StepMemory
from probes.emulated_gpu.machine import read_processes
from probes.emulated_gpu.start import MACHINE
from probes.substitution import substituted
from probes.task import Task, WorkerDevice
from probes.worker import worker
from probes.worker.watch import MemoryWatch, memory_watch
from probes.worker.worker import memory_after_step
from probes.worker.workload import trainer_of_task
from scripts.emulated_grid import RECORD
from scripts.growth import EMPTIES
from scripts.recorded_worker import Segments

# Of the allocator's history, which is emptied after each step. A step that has more is recorded without what it needs.
MOST_EVENTS = 2_000_000


class Recorder:
    """Follows the allocator's history, and writes at each step's end what the step took at most.

    `allocated`, `reserved`, `needed`: bytes at most, `needed` in segments that hold a block; `stays`, `kept`: allocated
    and reserved at the step's end; `held`: of this process on the card at the step's end, with its context and engine;
    `peak`: the same at most until now; `retries`: how often until now the allocator has emptied its cache, as the card
    was full; `host`: of the process.
    """

    def __init__(self) -> None:
        self._segments = Segments()
        self._sizes: dict[int, int] = {}  # blocks in use, by address
        self._allocated = self._reserved = 0

    def step_ends(self, device: WorkerDevice) -> StepMemory:
        """Write the step that ends, and return what this process holds now."""
        after = memory_after_step(device)
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        record_history()
        self._segments.begin()
        allocated, reserved = self._allocated, self._reserved
        for event in events:
            if "addr" in event:  # a request that found no memory has none
                self._segments.add(event)
                self._count(event)
                allocated, reserved = max(allocated, self._allocated), max(reserved, self._reserved)
        whole = len(events) < MOST_EVENTS
        free, total = torch.cuda.mem_get_info()
        own = [each for each in read_processes(Path(os.environ[MACHINE])) if each.process == os.getpid()]
        held, peak = total - free, own[0].peak_bytes[torch.cuda.current_device()]
        step = {
            "allocated": allocated if whole else 0,
            "needed": self._segments.most_needed if whole else 0,
            "reserved": reserved if whole else 0,
            "stays": after.allocated_bytes,
            "kept": after.reserved_bytes,
            "held": held,
            "peak": peak,
            "retries": torch.cuda.memory_stats().get("num_alloc_retries", 0),
            "host": after.host_bytes,
        }
        with Path(os.environ[RECORD], f"{PartialState().process_index}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(step) + "\n")
        return after

    def _count(self, event: dict[str, Any]) -> None:
        action, size = event["action"], event["size"]
        if action == "alloc":
            self._sizes[event["addr"]] = size
            self._allocated += size
        elif action == "free_completed":
            self._allocated -= self._sizes.pop(event["addr"], 0)
        elif action in ("segment_alloc", "segment_map"):
            self._reserved += size
        elif action in ("segment_free", "segment_unmap"):
            self._reserved -= size


def record_history() -> None:
    """Record the allocator's history from now on, without what was before."""
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=MOST_EVENTS)


def recording_watch(task: Task) -> MemoryWatch:
    """Return the watch of a task's memory, and record the allocator's history from now on."""
    watch = memory_watch(task)
    record_history()
    return watch


def built(task: Task, engine_arguments: dict[str, Any]) -> Any:
    """Build the task's trainer with the setting that no candidate has: how often it empties the cache."""
    found = trainer_of_task(task, engine_arguments)
    if os.environ.get(EMPTIES):
        found.trainer.args.torch_empty_cache_steps = int(os.environ[EMPTIES])
    return found


if __name__ == "__main__":
    recorder = Recorder()
    with (
        substituted(worker, "memory_watch", recording_watch),
        substituted(worker, "memory_after_step", recorder.step_ends),
        substituted(worker, "trainer_of_task", built),
    ):
        sys.exit(worker.main(sys.argv[1]))
