"""`Gpu` and `Cluster`: the GPUs of a job, how they are spread over nodes, and the host memory of a node."""

from typing import Literal

from msgspec import Struct


class Gpu(Struct, frozen=True, kw_only=True):
    """One model of GPU. `total_bytes` is the memory that the driver reports, `free_bytes` the part this run may use.

    Link speeds are those of one direction: an A100's NVLink, sold as 600 GB/s, is 300e9 here.
    """

    name: str
    total_bytes: int
    free_bytes: int
    bf16_flops: float  # dense, per second, from the data sheet; the fp16 rate of a GPU without bf16
    memory_bytes_per_second: float
    nvlink_bytes_per_second: float  # 0: no NVLink, GPUs communicate over PCIe
    pcie_bytes_per_second: float
    compute_capability: tuple[int, int]
    source: str
    multiprocessors: int = 108  # an A100's, for reports that were saved without

    @property
    def supports_bf16(self) -> bool:
        """True from compute capability 8.0 (Ampere) on, the first with bf16 matrix units."""
        return self.compute_capability >= (8, 0)

    @property
    def supports_flash_attention_2(self) -> bool:
        """True from compute capability 8.0 (Ampere) on, which flash-attn 2 requires."""
        return self.compute_capability >= (8, 0)

    @property
    def supports_flash_attention_3(self) -> bool:
        """True for compute capability 9.0 (Hopper), whose instructions flash-attn 3 is written for (`sm_90a`)."""
        return self.compute_capability == (9, 0)

    @property
    def runs_hub_flash_attention_3(self) -> bool:
        """True for compute capability 8.0 to 9.0, for which flash-attn 3 of the Hub's kernels is built.

        Source: flash-attention, hopper/setup.py (sm80, sm90a); karpathy/nanochat#540 (runs on A100, not faster there
        than sdpa).
        """
        return (8, 0) <= self.compute_capability <= (9, 0)

    @property
    def runs_triton(self) -> bool:
        """True from compute capability 8.0 on, which Triton supports (triton 3.7, README.md, "Supported Hardware")."""
        return self.compute_capability >= (8, 0)


class HostMemory(Struct, frozen=True, kw_only=True):
    """Host memory of one node. `origin`: --host-memory, this machine, or what nodes with such GPUs usually have.

    "unlimited" is the memory of a node of which nothing is known, where a run has already been.
    """

    total_bytes: int
    origin: Literal["given", "local", "assumed", "unlimited"]
    source: str
    whole: bool = False  # True: plans may use all of it, since nothing fits in `SAFE_SHARE` of it

    @property
    def usable_bytes(self) -> int:
        """The bytes that plans may use at most: all of what is known, `SAFE_SHARE` of what is assumed."""
        return self.safe_bytes if self.origin == "assumed" else self.total_bytes

    @property
    def safe_bytes(self) -> int:
        """The bytes above which a plan is tight, if it uses them at all."""
        free = self.whole or self.origin == "unlimited"
        return self.total_bytes if free else int(SAFE_SHARE * self.total_bytes)


# Share of a host memory that plans use: the system and the page cache of a checkpoint that is read take their part, and
# nodes of one kind differ. A run that we count at 98.5 % of 252 GiB was killed (hiyouga/LLaMA-Factory#4629).
SAFE_SHARE = 0.9
UNLIMITED_HOST = HostMemory(total_bytes=2**62, origin="unlimited", source="")
# Assumption without --network: 400 Gb/s a node, shared by its GPUs, as in AWS p4d. A DGX H100 has eight such links.
USUAL_NETWORK_BYTES_PER_SECOND = 50e9


class Cluster(Struct, frozen=True, kw_only=True):
    """`nodes` nodes with `gpus_per_node` GPUs of one model each; `network_bytes_per_second` of one node, one way.

    `teacher_gpus`: GPUs of the node besides, which a teacher's vLLM server has (planner/jobs/teacher.py).
    """

    gpu: Gpu
    nodes: int
    gpus_per_node: int
    host: HostMemory = UNLIMITED_HOST
    network_bytes_per_second: float = USUAL_NETWORK_BYTES_PER_SECOND
    teacher_gpus: int = 0

    @property
    def rented_per_node(self) -> int:
        """GPUs of one node, with those of a teacher's server."""
        return self.gpus_per_node + self.teacher_gpus

    def trainer_gpus(self, server_gpus: int) -> int:
        """The GPUs left to the trainer beside a vLLM server, at least 1. Of several nodes the server has one."""
        server = self.gpus_per_node if self.nodes > 1 else server_gpus
        return max(1, self.num_gpus - server)

    @property
    def server_shares(self) -> list[tuple[int, int]]:
        """The ways to divide the GPUs between a vLLM server and the trainer: GPUs of the server, of the trainer.

        On one node the server can have any number of GPUs. Of several nodes it has one (planner/launch/placement.py).
        """
        if self.nodes > 1:
            return [(self.gpus_per_node, self.num_gpus - self.gpus_per_node)]
        return [(size, self.num_gpus - size) for size in range(1, self.num_gpus)]

    @property
    def num_gpus(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus_per_node
