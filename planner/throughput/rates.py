"""Rates that GPUs, links and hosts reach in practice, as fractions of their data sheets, each with its source."""

from planner.cache_keys import TrainingInput
from planner.gpus.cluster import Cluster, Gpu

# Matrix products with the shapes of language models, as a fraction of the dense data-sheet rate, by compute capability.
# Source: H100 and H200 reach about 720 of 989 TFLOP/s with such shapes (SemiAnalysis, "MI300X vs H100 vs H200 Benchmark
# Part 1: Training"): 0.91 of the 792 that their best shape reaches (stas00/ml-engineering,
# compute/accelerator/README.md). The other rows are 0.91 of the best shape: A100 268 of 312 (same table), Ada and the
# graphics cards of Ampere 0.92 (L20: 110 of 119.5, CUDA-Learn-Notes, hgemm). B200: 0.67 measured with such shapes
# (arXiv 2604.23466, tables III and IV: 1448 to 1562 of 2250).
MATMUL_FRACTION: dict[tuple[int, int], float] = {(8, 0): 0.78, (8, 6): 0.84, (8, 9): 0.84, (9, 0): 0.73, (10, 0): 0.67}
MATMUL_FRACTION_ELSEWHERE = 0.73  # other capabilities, for which no figure was found: the fraction of Hopper
# The same of cards whose best shape was measured: 0.91 of it, as for Hopper. Graphics cards run above the boost clock
# of their data sheets, since their tensor cores are held to half of their rate; cards for workstations and servers come
# to their power limits first. Source: zzc0721/torch-performance-test-data, database.md and issues 78, 96 and 124,
# torch.matmul of squares up to 10,240 in bf16 (T4: fp16), TFLOP/s: RTX 3080 Ti 76.5 of 68.2, 3090 76.6 of 71.2, 4070
# Super 75.2 of 71, 4090 164.8 of 165.2, 4090 48G 162.4, 4090 D 148.9 of 147.1, 5090 238 of 209.5, A6000 123.3 of 154.8,
# L40S 269.2 of 362, H20 141.9 of 148, RTX PRO 6000 413.7 of 467.8, T4 42.3 of 65.
MATMUL_FRACTION_OF_CARD: dict[str, float] = {
    "RTX-3080-Ti": 1.02, "RTX-3090": 0.98, "RTX-4070-Super": 0.96, "RTX-4090": 0.91, "RTX-4090-48G": 0.89,
    "RTX-4090D": 0.92, "RTX-5090": 1.03, "RTX-A6000": 0.72, "L40S": 0.68, "H20": 0.87, "RTX-PRO-6000": 0.80, "T4": 0.59,
}  # fmt: skip

# Memory traffic as a fraction of the data-sheet bandwidth. In a decode step of vLLM 0.6.3 on an A100-80G, Qwen2.5-32B
# (22.13 tokens/s) reads 36.0e9 bytes more than 14B (46.30 tokens/s) and takes 23.6 ms longer: 0.75 of 2.04e12 bytes per
# second.
# Source: QwenLM/Qwen2.5, docs/source/benchmark/speed_benchmark.rst.
MEMORY_FRACTION = 0.75

# Attention kernels as a fraction of the dense data-sheet rate, forward and backward together, causal pairs counted
# once: (Ampere and Ada, Hopper, data-center Blackwell).
# Source: Ampere: FlashAttention-2 (arXiv 2307.08691, section 4.1: forward and backward 50-73 % of an A100). Hopper:
# FlashAttention-3 (arXiv 2407.08608, figures 5 and 6, H100, heads of 128, 8k tokens): TFLOP/s of the causal forward and
# of the backward pass are 333 and 318 for FlashAttention-2, 529 and 518 for cuDNN, 602 and 559 for FlashAttention-3, of
# 989. Blackwell, B200: FlashAttention-2 346 TFLOP/s (Dao-AILab/flash-attention#1589, 16k tokens, heads of 64); cuDNN is
# not slower than FlashAttention-4 (sgl-project/sglang#33655), which reaches 1418 and 1118 (flash-attention#2280), of
# 2250.
#
# "sdpa" is the kernel that PyTorch takes first: cuDNN on Hopper and data-center Blackwell if its cuDNN is newer than
# 9.15, which CUDA 13 wheels bring, FlashAttention-2 elsewhere (torch 2.13,
# aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, `check_prefer_cudnn_attention` and `priority_order`; the
# variable TORCH_CUDNN_SDPA_DEPRIORITIZED turns it off). cuDNN is 1.7 to 2.3 times as fast as FlashAttention-2 on Hopper
# and not elsewhere (huggingface/transformers#48163).
#
# With a mask FlashAttention cannot run (sdp_utils_cpp.h, `check_for_attn_mask`). cuDNN can (`can_use_cudnn_attention`);
# no rate with a mask was found, so that it is counted like that without one. Other cards run the memory-efficient
# kernel, about half as fast as FlashAttention-2 (arXiv 2307.08691, figure 4: xformers' cutlass kernel). eager is two
# matrix products at Hopper's MATMUL_FRACTION, plus the traffic of ATTENTION_SCORE_BYTES.
ATTENTION_FRACTION: dict[str, tuple[float, float, float]] = {
    "flash_attention_2": (0.50, 0.33, 0.15),
    "flash_attention_3": (0.50, 0.58, 0.15),
    "sdpa": (0.50, 0.53, 0.55),
    "sdpa-masked": (0.25, 0.53, 0.55),
    "sdpa-efficient": (0.25, 0.175, 0.15),  # the memory-efficient kernel without a mask
    "eager": (0.73, 0.73, 0.73),
}
# Column of ATTENTION_FRACTION by major compute capability. Graphics cards of Blackwell (12.0) run Ada's kernels.
ATTENTION_COLUMN = {9: 1, 10: 2}
AMPERE = (8, 0)
HOPPER_MAJOR = 9

# float32 without autocast, as a fraction of the 16-bit rate: the rate of the CUDA cores, since torch leaves TF32 off
# (torch.backends.cuda.matmul.allow_tf32). Source: data sheets: A100 19.5 of 312, H100 and H200 67 of 989, B200 80 of
# 2250, V100 15.7 of 125, T4 8.1 of 65 (fp16). Graphics cards reach about half of their bf16 rate with fp32 accumulation
# (RTX 3090 35.6 of 71, RTX 4090 82.6 of 165).
FP32_FRACTION: dict[tuple[int, int], float] = {
    (7, 0): 0.125,
    (7, 5): 0.125,
    (8, 0): 0.0625,
    (9, 0): 0.068,
    (10, 0): 0.036,
}
FP32_FRACTION_ELSEWHERE = 0.5
# bf16 on cards before Ampere, as a fraction of their float32 rate: they compute in float32 and cast. Source:
# zzc0721/torch-performance-test-data, database.md, TFLOP/s in bf16 of float32: T4 2.46 of 4.17 and 2.27 of 4.43, P40
# 5.26 of 10.07, V100S 9.85 of 13.55, RTX 2080 5.14 of 9.23.
EMULATED_BF16_FRACTION = 0.55
# float32 in TF32, as a fraction of the 16-bit rate with fp32 accumulation. Source: data sheets: A100 156 of 312, H100
# 495 of 989, B200 1,100 of 2,250; RTX 3090 35.6 of 71, RTX 4090 82.6 of 165.
TF32_FRACTION = 0.5

# NCCL's collectives as a fraction of the link, one direction. Source: NVIDIA/nccl-tests#178: bus bandwidth of
# all_reduce 208 of 300e9 B/s between two A100 with NVLink, 20 of 31.5e9 B/s with a third GPU behind PCIe 4.0 x16.
NVLINK_FRACTION = 0.69
PCIE_PEER_FRACTION = 0.63
# NCCL's collectives over several nodes as a fraction of a node's network. Source: NVIDIA/nccl#1229: bus bandwidth of
# reduce_scatter on four nodes of H100 360e9 B/s, of 400e9 with eight 400 Gb/s cards a node; 345 on eight, 320 on 16.
NETWORK_FRACTION = 0.9
# Copies between pinned host memory and a GPU as a fraction of PCIe.
# Source: ZaidQureshi/bam#54: 25 of 32e9 B/s, PCIe 4.0 x16, A100.
PCIE_COPY_FRACTION = 0.78


def matmul_rate(gpu: Gpu, candidate: TrainingInput) -> float:
    """FLOP/s of matrix products on one GPU in the candidate's compute dtype.

    GPUs before Ampere emulate bf16 in float32 (`torch.cuda.is_bf16_supported(including_emulation=True)`).

    Example: A100 under bf16: 0.78 x 312e12 = 243e12; in float32 without autocast 0.78 x 19.5e12 = 15e12,
    in TF32 0.78 x 156e12 = 122e12.
    """
    if gpu.compute_capability < AMPERE and (candidate.precision == "bf16" or candidate.dtype == "bfloat16"):
        return float32_rate(gpu) * EMULATED_BF16_FRACTION
    if candidate.precision == "no" and candidate.dtype == "float32":
        return sixteen_bit_rate(gpu) * TF32_FRACTION if candidate.tf32 else float32_rate(gpu)
    return sixteen_bit_rate(gpu)


def sixteen_bit_rate(gpu: Gpu) -> float:
    """FLOP/s of matrix products on one GPU in its 16-bit dtype: bf16, or fp16 before Ampere."""
    of_kind = MATMUL_FRACTION.get(gpu.compute_capability, MATMUL_FRACTION_ELSEWHERE)
    return gpu.bf16_flops * MATMUL_FRACTION_OF_CARD.get(gpu.name, of_kind)


def float32_rate(gpu: Gpu) -> float:
    """FLOP/s of matrix products in float32 on one GPU."""
    return sixteen_bit_rate(gpu) * FP32_FRACTION.get(gpu.compute_capability, FP32_FRACTION_ELSEWHERE)


def attention_rate(gpu: Gpu, kernel: str) -> float:
    """FLOP/s of an attention kernel (a key of ATTENTION_FRACTION) on one GPU.

    Example: sdpa without a mask on an H100: 0.53 x 989e12 = 524e12; on an A100 0.50 x 312e12 = 156e12.
    """
    return gpu.bf16_flops * ATTENTION_FRACTION[kernel][ATTENTION_COLUMN.get(gpu.compute_capability[0], 0)]


def memory_rate(gpu: Gpu) -> float:
    """Bytes per second between a GPU and its memory. Example: A100-80G: 0.75 x 2.04e12 = 1.53e12."""
    return gpu.memory_bytes_per_second * MEMORY_FRACTION


def link_rate(cluster: Cluster, num_nodes: int) -> float:
    """Bytes per second of one GPU in a ring over `num_nodes` nodes, which has the speed of its slowest link.

    Example: 8 x H100: 0.69 x 450e9 = 310e9; over two nodes 0.9 x 50e9 = 45e9.
    """
    gpu = cluster.gpu
    inside = gpu.nvlink_bytes_per_second * NVLINK_FRACTION or gpu.pcie_bytes_per_second * PCIE_PEER_FRACTION
    return min(inside, NETWORK_FRACTION * cluster.network_bytes_per_second) if num_nodes > 1 else inside


def shard_link_rate(cluster: Cluster, shard_gpus: int, num_nodes: int) -> float:
    """Bytes per second of one GPU in a ring over the GPUs that hold one copy of the model; in a node if they fit one.

    Example: 16 H100 on two nodes: 45e9; with a copy on each node 310e9.
    """
    return link_rate(cluster, num_nodes if shard_gpus > cluster.gpus_per_node else 1)


def host_rate(gpu: Gpu) -> float:
    """Bytes per second between one GPU and the host."""
    return gpu.pcie_bytes_per_second * PCIE_COPY_FRACTION
