"""Buckets in which DDP's rank 0 sends all parameters to the others, before the first step."""

from collections.abc import Iterable, Iterator
from itertools import pairwise

from msgspec import Struct

from planner.memory.parameters.tensors import rounded_bytes
from planner.units import MIB

# Bytes at which a bucket is full. Source: torch 2.13, nn/parallel/distributed.py, `broadcast_bucket_size`.
BUCKET_BYTES = 250 * MIB


class SentTensor(Struct, frozen=True, kw_only=True):
    """A tensor of the broadcast. `place`: its position among all. `kind`: its dtype; a bucket has one of them."""

    place: float
    kind: str
    size_bytes: int


def largest_buckets_bytes(tensors: Iterable[SentTensor]) -> int:
    """Bytes of the buckets that are alive at once: the largest sum of two that follow each other.

    Tensors of one dtype are joined in their order until a bucket has 250 MiB. Buckets go in the order of their first
    tensors, two at a time. A bucket of one tensor is that tensor itself: 0 bytes.

    Source: torch 2.13, nn/parallel/distributed.py (`_sync_module_states`), csrc/distributed/c10d/comm.cpp
    (`broadcast_coalesced`, `max_in_flight`), reducer.cpp (`compute_bucket_assignment_by_size`),
    csrc/utils/tensor_flatten.h (`flatten_dense_tensors`).
    """
    queues: dict[str, list[SentTensor]] = {}
    for tensor in sorted(tensors, key=lambda each: each.place):
        queues.setdefault(tensor.kind, []).append(tensor)
    buckets = sorted(bucket for queue in queues.values() for bucket in _buckets(queue))
    return max(one + other for (_, one), (_, other) in pairwise([*buckets, (0.0, 0)]))


def _buckets(queue: Iterable[SentTensor]) -> Iterator[tuple[float, int]]:
    """Yield (place of the first tensor, bytes that are allocated) of each bucket of tensors of one dtype."""
    first, count, size_bytes = 0.0, 0, 0
    for tensor in queue:
        first, count, size_bytes = first if count else tensor.place, count + 1, size_bytes + tensor.size_bytes
        if size_bytes >= BUCKET_BYTES:
            yield _bucket(first, count, size_bytes)
            count = size_bytes = 0
    if count:
        yield _bucket(first, count, size_bytes)


def _bucket(first: float, count: int, size_bytes: int) -> tuple[float, int]:
    return first, rounded_bytes(size_bytes) if count > 1 else 0
