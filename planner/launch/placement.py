"""Which GPU of which node does what: the trainer's processes, and a vLLM server with cards of its own."""

from dataclasses import dataclass

from planner.candidate import Candidate
from planner.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """`server_gpus` is 0 without a server; with several nodes a server has a node of its own, the last."""

    train_nodes: int
    processes_per_node: int
    server_gpus: int
    server_apart: bool  # on a node of its own

    @property
    def train_devices(self) -> str:
        """The trainer's cards of a node that it shares with the server, as CUDA_VISIBLE_DEVICES; empty where it has all."""
        return _devices(0, self.processes_per_node) if self.server_gpus and not self.server_apart else ""

    @property
    def server_devices(self) -> str:
        return _devices(0 if self.server_apart else self.processes_per_node, self.server_gpus)

    @property
    def gpus_per_node(self) -> int:
        shared = 0 if self.server_apart else self.server_gpus
        return max(self.processes_per_node + shared, self.server_gpus)


def placement(candidate: Candidate) -> Placement:
    """Where the candidate's processes run.

    Torchrun starts equally many on each node (accelerate 1.15, utils/launch.py: `nproc_per_node = num_processes // num_machines`), and
    an engine that spans nodes needs Ray, so that a server beside several training nodes has one whole node.

    Raises:
        InputError: the processes cannot be split so.
    """
    server = candidate.server_gpus
    apart = bool(server) and candidate.num_nodes > 1
    nodes = candidate.num_nodes - apart
    per_node, rest = divmod(candidate.num_processes, nodes)
    if rest:
        wanted = f"num_processes {candidate.num_processes} is not the same number on each of {nodes} nodes"
        raise InputError(
            f"{wanted}{', beside one for the vLLM server' if apart else ''}. Use num_processes={per_node * nodes or nodes}."
        )
    return Placement(train_nodes=nodes, processes_per_node=per_node, server_gpus=server, server_apart=apart)


def _devices(first: int, count: int) -> str:
    return ",".join(map(str, range(first, first + count)))
