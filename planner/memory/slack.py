"""Slack: the memory that PyTorch's allocator reserves beyond the tensors, needed or kept because there is room.

*Slack* is part of the need: on a smaller card the step runs out of memory. *Cache* is not: the allocator keeps every
block that it once got from the driver, which `torch.cuda.max_memory_reserved` and nvidia-smi show, and returns it
before it raises an out-of-memory error.
"""

from functools import lru_cache
from itertools import chain, product, starmap
from typing import Literal, NamedTuple

from planner.cache_keys import TrainingInput
from planner.candidate import Candidate
from planner.memory.communication import nccl_bytes
from planner.memory.dtypes import DTYPE_BYTES, FLOAT32_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.optimizer import held_segments_bytes
from planner.memory.parameters.quantized import shards_4bit_weights
from planner.memory.schemes.contract import PASSES
from planner.memory.schemes.table import scheme_of
from planner.memory.weights import policy_weights_bytes, unsharded_while_loading_bytes
from planner.methods import Loss
from planner.quantities import Component, Phase, PhaseMemory, dynamic_bytes
from planner.schemes import Sharding
from planner.units import MIB


class Shares(NamedTuple):
    """Bytes beyond the tensors, in thousandths of the dynamic bytes of a step: medians and standard deviations."""

    slack: int
    slack_deviation: int
    cache: int  # after steps of equal batches
    cache_deviation: int
    varied_cache: int  # after batches of differing lengths
    varied_cache_deviation: int


class RecordedShares(NamedTuple):
    """As `Shares`. The cache after batches of differing lengths was not recorded: see `shares_of`."""

    slack: int
    slack_deviation: int
    cache: int
    cache_deviation: int


class LogitsShares(NamedTuple):
    """Bytes beyond the tensors, in thousandths of the logits that a trainer gets: medians, and standard deviations."""

    slack: int
    slack_deviation: int
    cache: int
    cache_deviation: int


CheckpointedLayers = Literal["none", "some", "all"]  # how many of the layers are checkpointed
AllocatorLoss = Literal["no logits", "logits", "logits and log-softmax", "logits of two models"]


class AllocatorKind(NamedTuple):
    """Key of `RECORDED_SHARES`. Sharded models: any loss over whole logits is "logits", and "some" layers are "all"."""

    sharding: Sharding  # "none": every GPU holds the whole model
    loss: AllocatorLoss
    full: bool
    layers: CheckpointedLayers


# Used for all shares with expandable segments; with the default allocator only for the cache of sharded models, and for
# any model's cache after batches of differing lengths.
# Keys: full fine-tuning, checkpointed layers, expandable segments.
# Source: results/replay_slack.md.
SHARES: dict[tuple[bool, CheckpointedLayers, bool], Shares] = {
    (True, "none", False): Shares(23, 24, 91, 80, 234, 240),
    (True, "none", True): Shares(4, 3, 18, 26, 18, 37),
    (True, "some", False): Shares(73, 50, 130, 95, 307, 118),
    (True, "some", True): Shares(21, 20, 36, 46, 52, 37),
    (True, "all", False): Shares(172, 146, 363, 297, 312, 845),
    (True, "all", True): Shares(68, 45, 111, 78, 130, 90),
    (False, "none", False): Shares(16, 20, 28, 66, 434, 226),
    (False, "none", True): Shares(7, 13, 11, 29, 10, 26),
    (False, "some", False): Shares(32, 37, 53, 153, 290, 315),
    (False, "some", True): Shares(16, 22, 51, 50, 37, 48),
    (False, "all", False): Shares(123, 68, 182, 171, 395, 564),
    (False, "all", True): Shares(31, 49, 98, 66, 109, 56),
}
# Losses with the logits of all tokens. Their blocks are the largest: from the second step on smaller tensors split the
# free blocks, which then do not fit the next logits.
WHOLE_LOGITS: dict[Loss, AllocatorLoss] = {
    "logits": "logits",
    "completion_logits": "logits",
    "triple": "logits",
    "log_softmax": "logits and log-softmax",
    "preference": "logits and log-softmax",
    "unpaired": "logits and log-softmax",
    "most_likely": "logits of two models",
    "jsd": "logits of two models",
    "universal": "logits of two models",
    "sampled": "logits of two models",
    "weighted": "logits of two models",
    "scored": "logits of two models",  # of one, which take as small a share: results/emulated.md, server-distillation
}
LOSSES_BY_LOGITS: tuple[AllocatorLoss, ...] = ("logits", "logits and log-softmax")
# The default allocator: shares of the dynamic bytes, beside `LAST_SEGMENTS_BYTES` and `Scheme.split_blocks`. Slack is
# the unused part of segments that hold a block, an upper bound, in runs whose optimizer step is not what needs most.
# Source: results/emulated.md, where smaller cards need as much. Replays of one step on fake tensors saw half of it
# (results/replay_slack.md).
RECORDED_SHARES: dict[AllocatorKind, RecordedShares] = {
    AllocatorKind("none", "no logits", True, "none"): RecordedShares(54, 57, 73, 97),
    AllocatorKind("none", "no logits", True, "some"): RecordedShares(0, 35, 15, 67),
    AllocatorKind("none", "no logits", True, "all"): RecordedShares(84, 80, 106, 131),
    AllocatorKind("none", "no logits", False, "none"): RecordedShares(34, 28, 38, 63),
    AllocatorKind("none", "no logits", False, "some"): RecordedShares(35, 19, 60, 22),
    AllocatorKind("none", "no logits", False, "all"): RecordedShares(139, 113, 201, 208),
    AllocatorKind("none", "logits of two models", True, "none"): RecordedShares(36, 39, 50, 173),
    AllocatorKind("none", "logits of two models", True, "all"): RecordedShares(113, 93, 141, 115),
    AllocatorKind("none", "logits of two models", False, "none"): RecordedShares(7, 27, 32, 78),
    AllocatorKind("none", "logits of two models", False, "all"): RecordedShares(57, 66, 59, 118),
    AllocatorKind("zero1", "no logits", True, "none"): RecordedShares(227, 160, 370, 148),
    AllocatorKind("zero1", "no logits", True, "all"): RecordedShares(204, 134, 467, 186),
    AllocatorKind("zero1", "no logits", False, "none"): RecordedShares(60, 17, 61, 21),
    AllocatorKind("zero1", "no logits", False, "all"): RecordedShares(148, 233, 262, 314),
    AllocatorKind("zero1", "logits", True, "none"): RecordedShares(80, 32, 156, 60),
    AllocatorKind("zero1", "logits", True, "all"): RecordedShares(222, 88, 645, 299),
    AllocatorKind("zero1", "logits", False, "none"): RecordedShares(34, 45, 191, 162),
    AllocatorKind("zero1", "logits", False, "all"): RecordedShares(44, 50, 140, 93),
    AllocatorKind("zero2", "no logits", True, "none"): RecordedShares(129, 132, 398, 300),
    AllocatorKind("zero2", "no logits", True, "all"): RecordedShares(190, 181, 647, 336),
    AllocatorKind("zero2", "no logits", False, "none"): RecordedShares(38, 45, 77, 39),
    AllocatorKind("zero2", "no logits", False, "all"): RecordedShares(261, 272, 426, 248),
    AllocatorKind("zero2", "logits", True, "all"): RecordedShares(178, 59, 239, 602),
    AllocatorKind("zero2", "logits", False, "none"): RecordedShares(63, 25, 65, 36),
    AllocatorKind("zero2", "logits", False, "all"): RecordedShares(67, 124, 161, 307),
    AllocatorKind("zero3", "no logits", True, "all"): RecordedShares(128, 89, 675, 419),
    AllocatorKind("zero3", "no logits", False, "none"): RecordedShares(33, 44, 154, 133),
    AllocatorKind("zero3", "no logits", False, "all"): RecordedShares(54, 182, 332, 305),
    AllocatorKind("zero3", "logits", True, "all"): RecordedShares(162, 87, 1189, 587),
    AllocatorKind("zero3", "logits", False, "all"): RecordedShares(32, 52, 245, 162),
    AllocatorKind("fsdp2", "no logits", True, "none"): RecordedShares(0, 3, 293, 151),
    AllocatorKind("fsdp2", "no logits", True, "all"): RecordedShares(71, 87, 490, 189),
    AllocatorKind("fsdp2", "no logits", False, "none"): RecordedShares(27, 110, 127, 80),
    AllocatorKind("fsdp2", "no logits", False, "all"): RecordedShares(62, 144, 409, 182),
    AllocatorKind("fsdp2", "logits", True, "all"): RecordedShares(270, 90, 959, 50),
    AllocatorKind("fsdp2", "logits", False, "none"): RecordedShares(39, 30, 208, 75),
    AllocatorKind("fsdp2", "logits", False, "all"): RecordedShares(133, 73, 667, 239),
    AllocatorKind("distributed", "no logits", True, "all"): RecordedShares(40, 84, 337, 312),
    AllocatorKind("distributed", "no logits", False, "all"): RecordedShares(312, 53, 368, 219),
    AllocatorKind("tensor", "no logits", True, "none"): RecordedShares(31, 70, 39, 102),
    AllocatorKind("tensor", "no logits", True, "all"): RecordedShares(127, 86, 166, 116),
    AllocatorKind("tensor", "no logits", False, "all"): RecordedShares(75, 100, 172, 111),
}
# Losses over the logits of one model, of whole models with the default allocator; added to `LAST_SEGMENTS_BYTES`. Keys:
# loss, full fine-tuning. Source: as above.
LOGITS_SHARES: dict[tuple[AllocatorLoss, bool], LogitsShares] = {
    ("logits", False): LogitsShares(581, 379, 1608, 3084),
    ("logits", True): LogitsShares(1194, 462, 1770, 952),
    ("logits and log-softmax", False): LogitsShares(895, 769, 1022, 949),
    ("logits and log-softmax", True): LogitsShares(1102, 581, 1117, 1393),
}
# Cache of ZeRO-3's blocks where there is room, in thousandths of the allocated bytes: other streams give them back only
# when the GPU has caught up. Source: results/emulated.md, median of 56 chosen runs in which the emulated card finishes
# everything at once (27 to 649), without the random runs, which have smaller models; 72B with LoRA on four real GPUs
# 240 to 270 (results/published.md).
LATE_BLOCKS = 205
# The last segment (or page of an expandable segment) of the small and of the large pool is never full.
# Source: pytorch 2.13, c10/cuda/CUDACachingAllocator.cpp, `kSmallBuffer`, `kLargeBuffer` (2 MiB and 20 MiB).
LAST_SEGMENTS_BYTES = 22 * MIB
ENGINE_AWAKE: tuple[Phase, ...] = ("weight_sync", "rollout")


def fragmentation_bytes(components: dict[Component, int], candidate: TrainingInput, phase: Phase) -> int:
    """Bytes that the caching allocator has reserved and no tensor can use when memory runs out, on one GPU.

        dynamic   allocated bytes less weights, adapters and optimizer states, without NCCL's buffers
        slack     expandable segments: max(share x dynamic, 22 MiB)
                  default allocator, in `PASSES`: share x base + 22 MiB + `Scheme.split_blocks`; elsewhere, as in the
                  optimizer's step, max(share x base + 22 MiB, `split_blocks`)
        base      dynamic; of unsharded models with a loss over all logits, the logits (`LOGITS_SHARES`)
        at least `loaded_segments_bytes` (sharded 4-bit weights with the default allocator), and, while a colocated
        engine wakes and samples, `held_segments_bytes`

    Before an out-of-memory error the allocator returns every segment that is free as a whole. The rest counts: the
    "reserved but unallocated" bytes of the error message, not the much larger cache of a run with room to spare.

    Example: LoRA with checkpointing, 4 GiB of activations and gradients, expandable segments: 127 MiB.
    """
    # A colocated engine finds the trainer's cache emptied (trl 1.16, generation/vllm_generation.py, `sync_weights`)
    held = held_segments_bytes(candidate) if candidate.vllm == "colocate" and phase in ENGINE_AWAKE else 0
    dynamic = dynamic_bytes(components, nccl_bytes(candidate))
    if not dynamic:
        return held
    return max(held, shared_slack_bytes(dynamic, candidate, phase), loaded_segments_bytes(components, candidate, phase))


def shared_slack_bytes(dynamic: int, candidate: TrainingInput, phase: Phase) -> int:
    """Slack on one GPU, without `loaded_segments_bytes`: a share of the dynamic bytes, and split blocks."""
    beside = beside_logits(candidate)
    share = beside[0].slack * beside[1] // 1000 if beside else dynamic * shares_of(candidate).slack // 1000
    if candidate.expandable_segments:
        return max(share, LAST_SEGMENTS_BYTES)
    share, split = share + LAST_SEGMENTS_BYTES, split_bytes(candidate, phase)
    return share + split if phase in PASSES else max(share, split)


def split_bytes(candidate: TrainingInput, phase: Phase) -> int:
    """Return `Scheme.split_blocks`; 0 for whole models with a loss over all logits, whose blocks are the largest."""
    if candidate.scheme_row.whole and allocator_loss(candidate) != "no logits":
        return 0
    return scheme_of(candidate).split_blocks(candidate, phase)


def loaded_segments_bytes(components: dict[Component, int], candidate: TrainingInput, phase: Phase) -> int:
    """Unused bytes on one GPU in segments that remain after a 4-bit model was loaded whole and then sharded.

        bytes = bytes of the loaded model - bytes that the pass has allocated on the default stream, at least 0

    The shards lie among the blocks that sharding freed, so that no segment is wholly free. Layers are received on
    another stream, which cannot use those blocks; FSDP2 then copies them to the default stream, which can, and FSDP 1
    does not. 0 with expandable segments, which give pages back. Source: torch 2.13,
    distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_all_gather_copy_out`; results/emulated.md.

    Example: Qwen2.5-7B on four GPUs needs 7.5 GiB in all under FSDP2 (emulated: 7.7), and 8.4 under ZeRO-3 (8.8).
    """
    if candidate.expandable_segments or candidate.num_processes == 1 or phase not in PASSES:
        return 0
    if not shards_4bit_weights(candidate):
        return 0
    loaded = policy_weights_bytes(candidate) + unsharded_while_loading_bytes(candidate)
    here = sum(size for component, size in components.items() if component not in ("runtime", "communication"))
    if candidate.scheme_row.units and not candidate.scheme_row.flat_units:
        here += (components.get("communication", 0) - nccl_bytes(candidate)) // 2
    return max(0, loaded - here)


def logits_bytes(candidate: TrainingInput) -> int:
    """Bytes of the logits that the trainer gets in one micro-step (`Head.logit_tokens`).

    0 for losses that are not in `LOSSES_BY_LOGITS`.

    Under autocast they are accelerate's float32 copies (accelerate 1.15, accelerator.py, `Accelerator.prepare_model`).
    """
    if allocator_loss(candidate) not in LOSSES_BY_LOGITS:
        return 0
    width = SIXTEEN_BIT_BYTES if candidate.precision != "no" else DTYPE_BYTES[candidate.dtype]
    tokens = candidate.labelled_tokens if candidate.method_row.completion_logits_only else candidate.tokens
    return tokens * candidate.model.vocab_size * (FLOAT32_BYTES if candidate.autocasts else width)


@lru_cache(maxsize=256)
def beside_logits(candidate: TrainingInput) -> tuple[LogitsShares, int] | None:
    """Return the row of `LOGITS_SHARES` for a candidate and the bytes of its logits; None if no row applies.

    No row applies with expandable segments, nor to sharded models.
    """
    logits = logits_bytes(candidate)
    if not logits or candidate.expandable_segments or not candidate.scheme_row.whole:
        return None
    return LOGITS_SHARES[allocator_loss(candidate), candidate.tuning == "full"], logits


def cache_shares(candidate: TrainingInput, deviations: float) -> tuple[float, float]:
    """Cache of a run with room to spare: its share of the dynamic bytes, and by how much the share may be larger.

    The share is that of equal batches, whose blocks every step needs again. Batches of other lengths leave blocks that
    longer tensors do not fit: their share is counted where lengths are known to differ (`rows_differ`), whose growth
    over the steps results/growth.md shows, and may come in addition where batches are padded. `deviations`: standard
    deviations to the ends of an interval.
    """
    shares = shares_of(candidate)
    share = shares.cache
    most = share + deviations * shares.cache_deviation
    if candidate.rows_differ and candidate.layout in ("padded", "padding_free"):
        share = max(share, shares.varied_cache)
    if candidate.pads or share > shares.cache:
        most = max(most, shares.varied_cache + deviations * shares.varied_cache_deviation)
    return share / 1000, (most - share) / 1000


def cache_base_bytes(candidate: TrainingInput) -> int:
    """Bytes of the cache in addition to the share of `cache_shares`: `cached_blocks_bytes`, and a share of logits."""
    beside = beside_logits(candidate)
    return (beside[0].cache * beside[1] // 1000 if beside else 0) + cached_blocks_bytes(candidate)


def cached_blocks_bytes(candidate: TrainingInput) -> int:
    """Bytes of the last segments, and of whole models the blocks that the backward pass has split."""
    if candidate.expandable_segments:
        return 0
    return LAST_SEGMENTS_BYTES + (split_bytes(candidate, "backward") if candidate.scheme_row.whole else 0)


def evaluation_cache_bytes(candidate: Candidate, phases: tuple[PhaseMemory, ...]) -> int:
    """Bytes of blocks cached for the lighter of training and evaluation, which the heavier cannot reuse.

    Batches of another number of rows have tensors of other sizes. Expandable segments give their pages to any tensor,
    and after rollouts the blocks of whole steps are split already. Source: results/emulated.md, random jobs that
    evaluate: 7 without rollouts keep 0.2 to 1.3 times these bytes, 10 with them next to nothing.

    Example: a KTO step with 3.0 GiB of dynamic bytes and an evaluation with 6.9: 10.3 GiB reserved in all.
    """
    if candidate.eval_strategy == "no" or candidate.expandable_segments or candidate.method_row.generates:
        return 0
    if candidate.per_device_eval_batch_size == candidate.per_device_train_batch_size:
        return 0
    nccl = nccl_bytes(candidate)
    dynamic = {phase.name: dynamic_bytes(phase.components, nccl) for phase in phases if phase.name in PASSES}
    evaluated = dynamic.pop("evaluation", 0)
    return min(evaluated, max(dynamic.values(), default=0))


def cache_base_reach_bytes(candidate: TrainingInput, deviations: float) -> int:
    """Bytes by which the cache may exceed `cache_base_bytes`, at `deviations` standard deviations."""
    beside = beside_logits(candidate)
    return int(deviations * beside[0].cache_deviation * beside[1] / 1000) if beside else 0


def late_share(candidate: TrainingInput) -> float:
    """Cache as a share of the allocated bytes, where there is room: blocks of other streams are released late.

    0 unless ZeRO-3 gathers layers. With expandable segments the emulated runs show the same share.
    """
    return LATE_BLOCKS / 1000 if gathers(candidate) else 0.0


def gathers(candidate: TrainingInput) -> bool:
    """Return whether ZeRO-3 gathers layers, on streams of their own."""
    return candidate.scheme_row.traces_modules and (candidate.num_processes > 1 or candidate.offload_param)


@lru_cache(maxsize=256)
def shares_of(candidate: TrainingInput) -> Shares:
    """Return the shares of a candidate's dynamic bytes.

    Where `beside_logits` has a row, that row has all of the slack and cache.
    """
    kind = allocator_kind(candidate)
    shares = SHARES[kind.full, checkpointed_layers(candidate), candidate.expandable_segments]
    if beside_logits(candidate):
        return shares._replace(slack=0, slack_deviation=0, cache=0, cache_deviation=0, varied_cache=0)
    if candidate.expandable_segments:
        return shares
    own = recorded_shares(kind)
    if not candidate.scheme_row.whole:
        return shares._replace(slack=own.slack, slack_deviation=own.slack_deviation)
    deviation = own.cache_deviation or shares.cache_deviation  # 0: of equal runs
    return shares._replace(
        **own._replace(cache_deviation=deviation)._asdict(), varied_cache=max(shares.varied_cache, own.cache)
    )


def recorded_shares(kind: AllocatorKind) -> RecordedShares:
    """Return the row of `RECORDED_SHARES` for a kind, or for the nearest kind that was recorded.

    Nearest is the same scheme and loss with no layers checkpointed (close to some) or all, then the same scheme without
    whole logits, then one GPU. A sharded model without checkpoints takes the share of one GPU without them rather than
    that of its scheme with them: most of its dynamic bytes are activations that are allocated once and leave no gaps,
    while under checkpoints most are temporaries of layers. Source: results/emulated.md, emulated_branches.jsonl: of
    twelve runs of kinds without a row the need was off by 2.1 % in the mean, where the other order had 7.1 %.
    """
    schemes: tuple[Sharding, ...] = (kind.sharding, "none")
    losses: tuple[AllocatorLoss, ...] = (kind.loss, "no logits")
    layers: tuple[CheckpointedLayers, ...] = (kind.layers, "none", "all")
    alike = product(schemes, losses, (kind.full,), ("none",)) if kind.layers == "none" else ()
    near = starmap(AllocatorKind, chain(alike, product(schemes, losses, (kind.full,), layers)))
    return next(RECORDED_SHARES[each] for each in near if each in RECORDED_SHARES)


def allocator_kind(candidate: TrainingInput) -> AllocatorKind:
    """Return the kind of a candidate in `RECORDED_SHARES`."""
    loss, full, layers = allocator_loss(candidate), candidate.tuning == "full", checkpointed_layers(candidate)
    if candidate.scheme_row.whole or candidate.num_processes == 1:  # one process sends nothing
        return AllocatorKind("none", loss, full, layers)
    loss = "no logits" if loss == "no logits" else "logits"
    return AllocatorKind(
        candidate.scheme_row.slack_as or candidate.sharding, loss, full, "none" if layers == "none" else "all"
    )


def allocator_loss(candidate: TrainingInput) -> AllocatorLoss:
    """Return the kind of a loss by the whole logits that it builds; losses of TRL before 1.5 count as none."""
    return WHOLE_LOGITS.get(candidate.loss, "no logits")


def checkpointed_layers(candidate: TrainingInput) -> CheckpointedLayers:
    """Return how many of a candidate's layers are checkpointed."""
    if not candidate.gradient_checkpointing:
        return "none"
    return "all" if candidate.checkpoint_every_n_layers == 1 else "some"
