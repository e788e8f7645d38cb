"""The worker of a probe on a GPU with the allocator's history: `python -m scripts.recorded_worker TASK.json`.

Each rank writes to a file in the folder that `RECORD` names the bytes in segments that hold a block, at most, those of
each stream that the allocator had reserved when it had reserved most, and the bytes that tensors asked for, at most.
"""

import json
import os
import sys
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from planner.measurements.measurement import Measurement
from probes.substitution import substituted
from probes.task import Task
from probes.worker import worker
from probes.worker.watch import MemoryWatch, memory_watch
from probes.worker.worker import measure

RECORD = "PLAN_ALLOCATOR_RECORD"  # environment variable: path of the folder
MOST_EVENTS = 4_000_000  # older ones are dropped: then nothing is written


def recording_watch(task: Task) -> MemoryWatch:
    """Return the watch of a task's memory, and record the allocator's history from now on."""
    watch = memory_watch(task)
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=MOST_EVENTS)
    return watch


def recorded(task: Task) -> Measurement:
    """Run the task, write this rank's record, and return the measurement."""
    found = measure(task)
    if os.environ.get(RECORD):
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
        if len(events) < MOST_EVENTS:
            file = Path(os.environ[RECORD], f"{PartialState().process_index}.json")
            placed = [each for each in events if "addr" in each]  # not requests that found no memory
            record = {**record_of(placed), "requested": most_requested(placed)}
            file.write_text(json.dumps(record), encoding="utf-8")
    return found


class Segments:
    """The allocator's segments as its history goes on, with the most bytes since `begin`.

    `needed_bytes` are in segments with at least one block. A block is in use until it is free for its stream and for
    all others that used it (`free_completed`).
    Source: torch 2.13, c10/cuda/CUDACachingAllocator.cpp, `TraceEntry`, `free_block`. Expandable segments are mapped in
    pages and have no such figure.
    """

    def __init__(self) -> None:
        self._segments: dict[int, tuple[int, int]] = {}  # by address: size, stream
        self._starts: list[int] = []  # their addresses, in order
        self._held: Counter[int] = Counter()  # blocks in use, by address of their segment
        self._home: dict[int, int] = {}  # address of a block's segment
        self._needed = 0
        self._streams: Counter[int] = Counter()
        self.most_needed = self.most_reserved = 0
        self.streams: dict[str, int] = {}  # reserved bytes of each stream, when most was reserved

    def begin(self) -> None:
        """Begin a step: the most is what there is now."""
        self.most_needed, self.most_reserved = self._needed, self._streams.total()

    def add(self, event: dict[str, Any]) -> None:
        action, address, size = event["action"], event["addr"], event["size"]
        if action == "segment_alloc":
            self._segments[address] = (size, event["stream"])
            insort(self._starts, address)
            self._streams[event["stream"]] += size
            if self._streams.total() > self.most_reserved:
                self.most_reserved = self._streams.total()
                self.streams = {str(number): total for number, total in self._streams.items()}
        elif action == "segment_free":
            self._starts.remove(address)
            size, stream = self._segments.pop(address)
            self._streams[stream] -= size
        elif action == "alloc":
            if not self._starts or address < self._starts[0]:
                return  # in a segment that is older than the record
            self._home[address] = at = self._starts[bisect_right(self._starts, address) - 1]
            self._held[at] += 1
            self._needed += self._segments[at][0] if self._held[at] == 1 else 0
            self.most_needed = max(self.most_needed, self._needed)
        elif action == "free_completed" and address in self._home:
            at = self._home.pop(address)
            self._held[at] -= 1
            self._needed -= self._segments[at][0] if self._held[at] == 0 else 0


def record_of(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Bytes in segments with at least one block, at most (`needed`), and by stream at the most reserved (`streams`)."""
    segments = Segments()
    for event in events:
        segments.add(event)
    return {"needed": segments.most_needed, "streams": segments.streams}


def most_requested(events: Iterable[dict[str, Any]]) -> int:
    """Most bytes that tensors asked for at once, with freed ones that another stream still uses.

    Blocks may be larger: the allocator leaves up to 1 MiB of a large one unsplit, and counts all of it as allocated.
    Source: torch 2.13, c10/cuda/CUDACachingAllocator.cpp, `should_split`.
    """
    sizes: dict[int, int] = {}  # by address, of what is in use
    now = most = 0
    for event in events:
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            now += event["size"]
            most = max(most, now)
        elif event["action"] == "free_completed":
            now -= sizes.pop(event["addr"], 0)
    return most


if __name__ == "__main__":
    with substituted(worker, "memory_watch", recording_watch), substituted(worker, "measure", recorded):
        sys.exit(worker.main(sys.argv[1]))
