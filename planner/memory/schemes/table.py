"""The scheme of each value of `sharding`."""

from planner.cache_keys import StateInput
from planner.memory.schemes.contract import Scheme
from planner.memory.schemes.distributed import Distributed
from planner.memory.schemes.fsdp1 import Fsdp1
from planner.memory.schemes.fsdp2 import Fsdp2
from planner.memory.schemes.tensor import Tensor
from planner.memory.schemes.whole import Whole
from planner.memory.schemes.zero import Zero1, Zero2
from planner.memory.schemes.zero3.scheme import Zero3
from planner.schemes import Sharding

SCHEME_OF: dict[Sharding, Scheme] = {
    "none": Whole(),
    "ddp": Whole(),
    "zero1": Zero1(),
    "zero2": Zero2(),
    "zero3": Zero3(),
    "fsdp2": Fsdp2(),
    "fsdp1": Fsdp1(),
    "distributed": Distributed(),
    "tensor": Tensor(),
}


def scheme_of(candidate: StateInput) -> Scheme:
    """Return the scheme under which a candidate trains."""
    return SCHEME_OF[candidate.sharding]
