"""The nodes and GPUs of the trainer's processes and of vLLM servers."""

from msgspec import Struct

from planner.candidate import Candidate
from planner.errors import InputError


class Placement(Struct, frozen=True, kw_only=True):
    """Distribution of a candidate's processes over nodes and GPUs.

    `server_gpus` is 0 without a vLLM server. With several nodes the server has its own node, the last one.
    """

    train_nodes: int
    processes_per_node: int
    server_gpus: int
    server_apart: bool  # True: the server has its own node
    teacher_gpus: int = 0  # of a server that scores completions, on the only node

    @property
    def train_devices(self) -> str:
        """CUDA_VISIBLE_DEVICES of the trainer on a node that it shares with the server; empty if it has all GPUs."""
        return _devices(0, self.processes_per_node) if self.beside_gpus else ""

    @property
    def server_devices(self) -> str:
        """CUDA_VISIBLE_DEVICES of the server: its own node's first GPUs, or those after the trainer's."""
        return _devices(0 if self.server_apart else self.processes_per_node, self.server_gpus)

    @property
    def teacher_devices(self) -> str:
        """CUDA_VISIBLE_DEVICES of the teacher's server: those after the others."""
        return _devices(self.processes_per_node + self.beside_gpus - self.teacher_gpus, self.teacher_gpus)

    @property
    def beside_gpus(self) -> int:
        """GPUs of servers on a node of the trainer."""
        return (0 if self.server_apart else self.server_gpus) + self.teacher_gpus

    @property
    def gpus_per_node(self) -> int:
        """GPUs needed on each node."""
        return max(self.processes_per_node + self.beside_gpus, self.server_gpus)


def placement(candidate: Candidate) -> Placement:
    """The placement of a candidate's processes.

    torchrun starts the same number of processes on each node (num_processes // num_machines; accelerate 1.15,
    utils/launch.py). An engine on several nodes would need Ray; therefore the server of a job with several nodes has
    one whole node.

    Raises:
        InputError: the processes cannot be divided evenly among the nodes.
    """
    server = candidate.server_gpus
    apart = bool(server) and candidate.num_nodes > 1
    nodes = candidate.num_nodes - apart
    per_node, rest = divmod(candidate.num_processes, nodes)
    if rest:
        wanted = f"num_processes {candidate.num_processes} is not the same number on each of {nodes} nodes"
        raise InputError(
            f"{wanted}{', beside one for the vLLM server' if apart else ''}. Use "
            f"num_processes={per_node * nodes or nodes}."
        )
    return Placement(
        train_nodes=nodes,
        processes_per_node=per_node,
        server_gpus=server,
        server_apart=apart,
        teacher_gpus=candidate.teacher_server_gpus,
    )


def _devices(first: int, count: int) -> str:
    """`count` GPU indices from `first` on, separated by commas."""
    return ",".join(map(str, range(first, first + count)))
