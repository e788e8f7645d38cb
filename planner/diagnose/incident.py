"""What a log says of one lack of memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from planner.quantities import Phase

Kind = Literal[
    "gpu",  # PyTorch's allocator found no block
    "library",  # cuBLAS, cuDNN or the CUDA runtime, which say nothing of sizes
    "communication",  # NCCL
    "engine_start",  # vLLM: less is free than its share of the card
    "engine_cache",  # vLLM: its share leaves nothing for a KV cache
    "engine_length",  # vLLM: the KV cache holds no sequence of the longest length
    "engine_pool",  # vLLM's sleep mode and expandable segments exclude each other
    "engine_wake",  # vLLM: what it had given back to sleep was taken when it woke up
    "engine_profile",  # vLLM: another process gave memory back while it measured its own
    "host",  # the machine's main memory
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Incident:
    """One error. `sizes` and `numbers` are those that its message names (messages.py); `where` the innermost place of the traceback that names code."""

    kind: Kind
    line: int  # of the log, from 1
    rank: str  # as the log marks it, empty where it does not
    gpu: int | None
    phase: Phase | None
    where: str
    sizes: Mapping[str, int]  # bytes
    numbers: Mapping[str, float]
    message: str
    gathers: bool = False  # whether ZeRO-3 was making the model whole

    @property
    def outside_bytes(self) -> int:
        """Of this process beside PyTorch's tensors and cache: context, NCCL, a colocated engine's pools. 0 where the message does not say."""
        known = {"process", "allocated", "unallocated"} <= self.sizes.keys()
        return max(self.sizes["process"] - self.sizes["allocated"] - self.sizes["unallocated"], 0) if known else 0

    @property
    def lacking_bytes(self) -> int:
        """What was asked for and not free."""
        return max(self.sizes.get("tried", 0) - self.sizes.get("free", 0), 0)

    @property
    def had_room(self) -> bool:
        """Whether more was free than was asked for, and no limit of the process is named: it was no lack of memory then."""
        return "allowed" not in self.sizes and 0 < self.sizes.get("tried", 0) <= self.sizes.get("free", 0)

    @property
    def fragmented(self) -> bool:
        """Whether what the allocator held without using it would have been enough."""
        return 0 < self.lacking_bytes <= self.sizes.get("unallocated", 0)
