"""The GPUs, as the driver reports them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One kind of card. `total_bytes` is what the driver reports, `free_bytes` what this run may use of it.

    Links are in one direction: an A100's NVLink, sold as 600 GB/s, is 300e9 here.
    """

    name: str
    total_bytes: int
    free_bytes: int
    bf16_flops: float  # dense, per second, from the data sheet; on a card without bf16 its fp16 rate
    memory_bytes_per_second: float
    nvlink_bytes_per_second: float  # 0: no NVLink, peers talk over PCIe
    pcie_bytes_per_second: float
    compute_capability: tuple[int, int]
    source: str

    @property
    def supports_bf16(self) -> bool:
        """Ampere (8.0) was the first with bf16 matrix units."""
        return self.compute_capability >= (8, 0)

    @property
    def supports_flash_attention_2(self) -> bool:
        """flash-attn 2 needs Ampere or newer."""
        return self.compute_capability >= (8, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """`nodes` machines with `gpus_per_node` equal cards each."""

    gpu: Gpu
    nodes: int
    gpus_per_node: int

    @property
    def num_gpus(self) -> int:
        return self.nodes * self.gpus_per_node
