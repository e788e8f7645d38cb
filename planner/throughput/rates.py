"""What a card, its links and its host really deliver: fractions of their data sheets, each with where it was seen."""

from planner.cache_keys import StateInput
from planner.gpus.cluster import Cluster, Gpu

# Matrix products of the shapes of language models, as a fraction of the dense data-sheet rate, by compute capability.
# Source: H100 and H200 reach about 720 of 989 TFLOP/s with such shapes (SemiAnalysis, "MI300X vs H100 vs H200 Benchmark Part 1: Training"),
# which is 0.91 of what the best shape of all reaches: 792 (stas00/ml-engineering, compute/accelerator/README.md). That 0.91 is taken of the
# best shapes of others: A100 268 of 312 (same table), Ada and the graphics cards of Ampere 0.92 (L20: 110 of 119.5,
# CUDA-Learn-Notes, hgemm); B200 0.67 measured with such shapes (arXiv 2604.23466, tables III and IV: 1448 to 1562 of 2250).
MATMUL_FRACTION: dict[tuple[int, int], float] = {(8, 0): 0.78, (8, 6): 0.84, (8, 9): 0.84, (9, 0): 0.73, (10, 0): 0.67}
MATMUL_FRACTION_ELSEWHERE = 0.73  # no figure found: Hopper's

# Memory traffic as a fraction of the data-sheet bandwidth: what vLLM 0.6.3 reads in a decode step of Qwen2.5-14B (46.30 tokens/s) and
# 32B (22.13) on an A100-80G: 36.0e9 more bytes take 23.6 ms longer, which is 0.75 of 2.04e12 a second.
# Source: QwenLM/Qwen2.5, docs/source/benchmark/speed_benchmark.rst.
MEMORY_FRACTION = 0.75

# Attention kernels as a fraction of the dense rate, on Ampere and Ada / on Hopper and later.
# Source: FlashAttention-2 (arXiv 2307.08691, section 4.1: forward and backward 50-73 % of an A100) and FlashAttention-3 (arXiv 2407.08608,
# abstract: FlashAttention-2 reaches 35 % of an H100, FlashAttention-3 75 %). sdpa without a mask runs FlashAttention-2; with one
# (internals.md 0.6) the memory-efficient kernel, about half as fast (arXiv 2307.08691, figure 4: xformers' cutlass kernel).
# eager is two matrix products, at Hopper's MATMUL_FRACTION (and the traffic of ATTENTION_SCORE_BYTES).
ATTENTION_FRACTION: dict[str, tuple[float, float]] = {
    "flash_attention_2": (0.50, 0.35),
    "flash_attention_3": (0.50, 0.75),
    "sdpa": (0.50, 0.35),
    "sdpa-masked": (0.25, 0.175),
    "sdpa-efficient": (0.25, 0.175),  # the same kernel without a mask
    "eager": (0.73, 0.73),
}
HOPPER = (9, 0)
AMPERE = (8, 0)

# float32 without autocast: torch leaves TF32 off (torch.backends.cuda.matmul.allow_tf32), so the rate is that of the CUDA cores.
# Source: data sheets: A100 19.5 of 312, H100 and H200 67 of 989, B200 80 of 2250, V100 15.7 of 125, T4 8.1 of 65 (fp16); cards for
# graphics have fp32 at about half of their bf16 rate with fp32 accumulation (RTX 3090 35.6 of 71, RTX 4090 82.6 of 165).
FP32_FRACTION: dict[tuple[int, int], float] = {
    (7, 0): 0.125,
    (7, 5): 0.125,
    (8, 0): 0.0625,
    (9, 0): 0.068,
    (10, 0): 0.036,
}
FP32_FRACTION_ELSEWHERE = 0.5

# Collectives as a fraction of the link, one direction. Source: NVIDIA/nccl-tests#178: all_reduce bus bandwidth 208 of 300e9 B/s between two A100
# with NVLink, 20 of 31.5e9 once a third card is behind PCIe 4.0 x16.
NVLINK_FRACTION = 0.69
PCIE_PEER_FRACTION = 0.63
# Between nodes one 400 Gb/s link a node is assumed, shared by its cards (AWS p4d has it; DGX H100 has eight, which is one for each card).
NODE_BYTES_PER_SECOND = 50e9
# Copies between pinned host memory and a card as a fraction of PCIe. Source: ZaidQureshi/bam#54: 25 of 32e9 B/s, PCIe 4.0 x16, A100.
PCIE_COPY_FRACTION = 0.78


def matmul_rate(gpu: Gpu, candidate: StateInput) -> float:
    """FLOP/s of matrix products on one card, in the dtype that the candidate computes in.

    Cards before Ampere have no bf16 units: torch lets them emulate it (`torch.cuda.is_bf16_supported(including_emulation=True)`)
    at the rate of float32.

    Example: A100 under bf16: 0.78 x 312e12 = 243e12; in float32 without autocast 0.78 x 19.5e12 = 15e12.
    """
    emulated = gpu.compute_capability < AMPERE and (candidate.precision == "bf16" or candidate.dtype == "bfloat16")
    if emulated or (candidate.precision == "no" and candidate.dtype == "float32"):
        return float32_rate(gpu)
    return sixteen_bit_rate(gpu)


def sixteen_bit_rate(gpu: Gpu) -> float:
    """FLOP/s of matrix products in the 16-bit dtype that the card has units for."""
    return gpu.bf16_flops * MATMUL_FRACTION.get(gpu.compute_capability, MATMUL_FRACTION_ELSEWHERE)


def float32_rate(gpu: Gpu) -> float:
    """FLOP/s of matrix products in float32 on one card."""
    return sixteen_bit_rate(gpu) * FP32_FRACTION.get(gpu.compute_capability, FP32_FRACTION_ELSEWHERE)


def attention_rate(gpu: Gpu, kernel: str) -> float:
    """FLOP/s of an attention kernel on one card."""
    return gpu.bf16_flops * ATTENTION_FRACTION[kernel][gpu.compute_capability >= HOPPER]


def memory_rate(gpu: Gpu) -> float:
    """Bytes per second between the card and its memory."""
    return gpu.memory_bytes_per_second * MEMORY_FRACTION


def link_rate(cluster: Cluster, num_nodes: int) -> float:
    """Bytes per second of one card in a ring over `num_nodes` nodes: the slowest link counts.

    Example: 8 x H100: 0.69 x 450e9 = 310e9; over two nodes of 8 cards, 50e9.
    """
    gpu = cluster.gpu
    inside = gpu.nvlink_bytes_per_second * NVLINK_FRACTION or gpu.pcie_bytes_per_second * PCIE_PEER_FRACTION
    return min(inside, NODE_BYTES_PER_SECOND) if num_nodes > 1 else inside


def host_rate(gpu: Gpu) -> float:
    """Bytes per second between one card and the host."""
    return gpu.pcie_bytes_per_second * PCIE_COPY_FRACTION
