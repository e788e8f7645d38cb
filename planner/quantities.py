"""Memory by phase and component on each GPU, speed, and remarks on them as data (`Reason`, `Note`).

planner/report/sentences.py makes the sentences.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from operator import attrgetter
from typing import Literal

from msgspec import Struct, field

from planner.candidate import Candidate
from planner.rows.batches import Epoch
from planner.settings.setting import Value

DEFAULT_RISK = 0.05  # accepted probability of running out of memory (results/verdict.md)
# The device of a probe that decided; "none": it was not probed.
ProbedOn = Literal["none", "cuda", "cpu", "emulated"]
Evidence = Literal["estimated", "emulated", "measured"]
Phase = Literal[
    "load", "rollout", "score", "forward", "loss", "backward", "optimizer_step", "evaluation", "weight_sync", "save"
]  # fmt: skip
Component = Literal[
    "weights",  # of every model on the GPU, as stored
    "adapters",  # LoRA matrices
    "gradients",
    "optimizer_states",
    "autocast_copies",  # 16-bit copies of float32 weights that autocast keeps, of GPTQ weights that autograd keeps
    "activations",  # saved for the backward pass
    "attention_scores",  # grows with the square of the length: scores, probabilities, masks
    "transients",  # alive within one layer's forward or backward pass only; optimizer temporaries
    "loss",  # head, logits, log-probabilities
    "kv_cache",  # of `generate`
    "engine",  # the vLLM engine in the same process
    "communication",  # gathered parameters, buckets, NCCL
    "fragmentation",  # reserved by the allocator, not allocated
    "runtime",  # CUDA context, cuBLAS workspaces
    "unexplained",  # measured bytes beyond the estimated components
]
GpuRole = Literal["train", "vllm", "train+vllm", "teacher"]

# The smallest block of PyTorch's CUDA caching allocator: every tensor takes a whole number of them.
# Source: pytorch 2.13, c10/core/AllocatorConfig.h, `kMinBlockSize`.
CUDA_BLOCK_BYTES = 512
TOTAL_BYTES = attrgetter("total_bytes")


class PhaseMemory(Struct, frozen=True, kw_only=True, dict=True):
    """One row of the table phase x component on one GPU, without components of 0 bytes."""

    name: Phase
    components: dict[Component, int]

    @cached_property
    def total_bytes(self) -> int:
        return sum(self.components.values())


# Components that are alive in every phase; that a forward and backward pass allocates; that PyTorch's allocator does
# not hand out.
RESIDENT: tuple[Component, ...] = ("weights", "adapters", "optimizer_states")
PASS: frozenset[Component] = frozenset({"activations", "attention_scores", "transients", "autocast_copies", "loss"})
OUTSIDE_THE_ALLOCATOR: tuple[Component, ...] = ("runtime", "engine", "fragmentation")


def dynamic_bytes(components: dict[Component, int], nccl_bytes: int) -> int:
    """Dynamic bytes: tensors allocated and freed within a step, for which the allocator caches blocks.

    `nccl_bytes`: the part of `communication` that NCCL gets from the driver itself.
    """
    kept = sum(components.get(component, 0) for component in RESIDENT + OUTSIDE_THE_ALLOCATOR)
    return sum(components.values()) - kept - nccl_bytes


class GpuMemory(Struct, frozen=True, kw_only=True, dict=True):
    """Memory of the `count` equal GPUs of one role. `details` splits components: {"engine_budget": {"weights": ..}}."""

    role: GpuRole
    count: int
    capacity_bytes: int  # that this run may use of the GPU
    phases: tuple[PhaseMemory, ...]
    interval_bytes: tuple[int, int]  # of the peak, at the job's risk
    details: dict[str, dict[str, int]]
    # Cache of PyTorch's allocator where there is room: some bytes plus a share of the dynamic bytes, and by how much
    # more both may be at the job's risk (planner/memory/slack.py).
    cache_base_bytes: int = 0
    cache_base_reach_bytes: int = 0
    cache_share: float = 0.0
    cache_reach: float = 0.0
    late_share: float = 0.0  # cache as a share of all allocated bytes, for blocks that other streams give back late
    # What PyTorch's allocator does not hand out: the CUDA context, and NCCL's buffers.
    context_bytes: int = 0
    nccl_bytes: int = 0
    nvidia_smi_miss: float = 0.0  # excess of the driver's figure in published runs, as a share (planner/confidence.py)

    @property
    def serves(self) -> bool:
        """True if a vLLM server of the sampling policy or of a teacher fills the GPUs, up to a share that is set."""
        return self.role in ("vllm", "teacher")

    @cached_property
    def peak(self) -> PhaseMemory:
        """Return the heaviest phase, the first of equals."""
        return max(self.phases, key=TOTAL_BYTES)

    @property
    def peak_bytes(self) -> int:
        return self.peak.total_bytes

    @property
    def headroom_bytes(self) -> int:
        """Return the memory that must stay free above the peak at the job's risk."""
        return self.interval_bytes[1] - self.peak_bytes

    @property
    def peak_phase(self) -> Phase:
        return self.peak.name

    @property
    def reserved_bytes(self) -> int:
        """Return the memory that PyTorch's allocator reserves on a card with room, `torch.cuda.max_memory_reserved`.

        A colocated engine lies in the same process and allocator, and so do workspaces of cuBLAS.
        """
        return self.nvidia_smi_bytes - self.context_bytes - self.nccl_bytes

    @property
    def nvidia_smi_bytes(self) -> int:
        """Return the process's memory as the driver shows it: the allocator keeps cached blocks while there is room."""
        return min(
            max(self.capacity_bytes, self.peak_bytes),
            max(
                phase.total_bytes - phase.components.get("fragmentation", 0) + self._cache_bytes(phase)
                for phase in self.phases
            ),
        )

    @property
    def nvidia_smi_interval_bytes(self) -> tuple[int, int]:
        """Interval of `nvidia_smi_bytes` from those of the peak and of the cache, at the job's risk.

        The upper end is at least what nine of ten published runs stayed below; no card shows more than it has.
        """
        shown, most = self.nvidia_smi_bytes, max(self.capacity_bytes, self.interval_bytes[1])
        reach = self.nvidia_smi_reach_bytes
        high = max(shown + reach, shown * (1 + self.nvidia_smi_miss))
        return max(0, min(self.interval_bytes[0], shown), int(shown - reach)), min(most, int(high))

    @property
    def nvidia_smi_reach_bytes(self) -> float:
        """Return half the width of `nvidia_smi_interval_bytes`, before the card's limit."""
        cache = self.cache_reach * max(dynamic_bytes(phase.components, self.nccl_bytes) for phase in self.phases)
        return math.hypot(self.interval_bytes[1] - self.peak_bytes, cache, self.cache_base_reach_bytes)

    def _cache_bytes(self, phase: PhaseMemory) -> int:
        """Return the allocator's cache in a phase, slack included."""
        dynamic = dynamic_bytes(phase.components, self.nccl_bytes)
        allocated = dynamic + sum(phase.components.get(component, 0) for component in RESIDENT)
        cache = max(self.cache_base_bytes + self.cache_share * dynamic, self.late_share * allocated)
        return max(int(cache), phase.components.get("fragmentation", 0))


class Throughput(Struct, frozen=True, kw_only=True):
    """Speed of a run: trained tokens per second of all GPUs, and the seconds of an optimizer step, by cause too.

    Where the lengths of rows are given, tokens are those of the rows without padding.
    """

    tokens_per_second: float
    step_seconds: float
    seconds: dict[str, float]
    evidence: Evidence
    epoch: Epoch | None = None  # one pass over the dataset, where the lengths of its rows are given


# Identifiers of remarks on a candidate, in JSON too: they do not change.
NoteCode = Literal[
    # Why a setting has its value: a `Reason`.
    "setting_chosen",
    # The largest length and batch, and what lies beyond them.
    "length_is_longest", "length_up_to", "length_up_to_model", "batch_fits_no_faster", "batch_not_estimated",
    "batch_does_not_fit", "layers_not_measured", "engine_does_not_start", "host_memory_short", "phase_peaks",
    # A candidate's memory and speed.
    "float32_by_default", "rounds_small_updates", "no_bfloat16", "float16_overflows", "display_takes_memory",
    "image_mask_dropped", "images_not_counted", "engine_spoils_images", "base_takes_no_adapters",
    "engine_would_keep_base", "sends_adapters_alone", "weight_sync_hangs", "server_not_quantized",
    "kernels_for_inference", "checkpoint_not_resumed", "batches_not_skipped", "resume_does_not_fit",
    "experts_taken_even",
    "experts_in_16_bits", "adapters_saved_alone",
    "deepspeed_alone", "network_assumed", "generates_without_cache", "step_too_long",
    "generates_large_model", "reference_kernels", "segments_left_out", "gathers_nothing_ahead",
    "flash_attention_from_hub",
    "sinks_without_gradient", "sdpa_builds_mask", "math_attention", "liger_needs_config", "liger_kernel_set",
    "hub_kernels", "reference_precomputed",
    "model_prepared", "adapters_cast_back", "not_sharded", "targets_left_out", "model_untouched",
    "engine_keeps_base", "vllm_without_bitsandbytes", "vllm_not_taken",
    "largest_rank", "method_came_later", "method_left", "method_experimental", "teacher_on_server",
    "samples_values_first",
    "rows_beyond_context",
    "prompt_length_assumed", "engine_takes_context", "engine_length_set",
    "engine_share_small", "server_takes_turns", "server_samples_meanwhile", "other_split",
    "effective_batch_changed", "gpus_idle",
    "model_source", "liger_not_installed",
    # A plan: fewer GPUs, the other ways to run and the changes with which a job fits.
    "fewer_gpus_faster", "fewer_gpus_fit", "safer_is_impractical", "alternative_faster", "rows_shared",
    "class_not_planned", "tuning_class",
    "tuning_class_offloading", "tuning_class_sharded", "with_offloading", "on_one_gpu", "with_16_bit_weights",
    "with_eager_attention",
    "micro_batch", "lengths_in_steps", "with_shared_rows", "without_pins", "host_memory_needed", "host_memory_tight",
    "host_memory_full",
    "row_length", "gpus_share_rows", "pins_instead", "setting_not_pinned", "with_option", "with_settings", "more_gpus",
    "larger_cards", "whole_nodes", "states_in_8_bit", "length_asked",
    # What would be faster at a price.
    "full_with_settings", "price_of_8_bit_states", "price_of_precomputing", "price_of_16_bit_adapters",
    "price_of_attention_adapters", "price_of_longer_rollouts", "price_of_grouped_lengths",
    "price_of_divided_experts", "price_of_16_bit_copy",
    # Dry runs, probes and the user's own results.
    "no_dry_run", "dry_run", "dry_run_ran_out", "searched_again", "cpu_counts_tensors",
    "ran_out_of_memory", "server_not_measured", "larger_card_probed",
    "probe_ran_out_of_memory", "probe_fits", "probe_needs_more", "proven_instead", "probe_peak",
    "memory_over_steps", "probe_has_no_phase",
    "phase_measured", "attention_not_installed", "own_probe_ran_out_of_memory", "own_probes", "own_runs",
    "own_context", "own_lines_unread", "own_storage_not_read",
    # Settings of the job and its config files.
    "keys_not_counted", "keys_not_used", "settings_not_read", "method_lacks_settings", "checkpointing_details_dropped",
    "length_not_used", "machines_of_file_overridden",
    "oldest_trl_taken", "keys_of_older_releases", "config_change", "config_unchanged", "rows_not_cut",
    "keys_without_effect", "read_as_tool", "lora_kernels_as_peft",
    # The lengths of rows.
    "rows_taken_full", "rows_cut", "completions_taken_full", "completions_cut", "rows_packed", "length_costs",
]  # fmt: skip
# Ranks of notes for a short answer, which shows a few of them: the most urgent first. A code that no row
# names is background: it explains what the plan does by itself.
ASKED, URGENT, ASSUMED, CHOSEN, BACKGROUND = range(5)
RANKED_NOTES: tuple[tuple[int, tuple[NoteCode, ...]], ...] = (
    # The user asked for it: a dry run, a probe.
    (ASKED, (
        "no_dry_run", "dry_run", "dry_run_ran_out", "searched_again",
        "ran_out_of_memory", "probe_peak", "probe_has_no_phase", "proven_instead", "cpu_counts_tensors",
        "memory_over_steps", "read_as_tool",
    )),
    # The run stops, learns something else or wastes the GPUs unless the user acts.
    (URGENT, (
        "float16_overflows", "weight_sync_hangs", "step_too_long", "generates_large_model", "safer_is_impractical",
        "own_probe_ran_out_of_memory",
        "method_lacks_settings", "checkpointing_details_dropped",
        "oldest_trl_taken",
        "method_left", "method_came_later", "adapters_cast_back", "not_sharded", "engine_keeps_base",
        "vllm_without_bitsandbytes",
        "vllm_not_taken", "reference_kernels", "sinks_without_gradient", "image_mask_dropped",
        "engine_spoils_images", "base_takes_no_adapters", "engine_would_keep_base", "sends_adapters_alone",
        "kernels_for_inference",
        "adapters_saved_alone", "checkpoint_not_resumed", "batches_not_skipped",
        "resume_does_not_fit", "rows_beyond_context",
        "rounds_small_updates", "generates_without_cache", "fewer_gpus_fit", "fewer_gpus_faster", "gpus_idle",
        "server_takes_turns", "server_samples_meanwhile", "teacher_on_server", "samples_values_first",
        "keys_not_counted", "rows_not_cut", "rows_cut", "completions_cut", "length_not_used",
        "machines_of_file_overridden", "attention_not_installed", "liger_not_installed",
    )),
    # The plan assumes what the user may know better.
    (ASSUMED, (
        "host_memory_tight", "host_memory_full", "display_takes_memory", "images_not_counted", "prompt_length_assumed",
        "server_not_quantized", "network_assumed", "effective_batch_changed", "engine_takes_context",
        "keys_not_used", "settings_not_read", "keys_of_older_releases",
        "own_lines_unread", "own_storage_not_read", "model_source", "class_not_planned", "rows_taken_full",
        "completions_taken_full", "experts_taken_even", "experts_in_16_bits",
        "lora_kernels_as_peft",
    )),
    # The plan chose what the user should know of: a package to install, data without padding.
    (CHOSEN, (
        "own_probes", "own_runs", "largest_rank", "targets_left_out", "keys_without_effect", "rows_packed",
        "sdpa_builds_mask", "math_attention", "method_experimental",
        "deepspeed_alone", "engine_share_small",
    )),
)  # fmt: skip
NOTE_RANKS: Mapping[NoteCode, int] = {code: rank for rank, codes in RANKED_NOTES for code in codes}


class Note(Struct, frozen=True):
    """Something to say about a candidate or a plan: a code and the values of its sentence, other notes among them."""

    code: NoteCode
    values: Mapping[str, object] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Return how urgent it is, from `ASKED` to `BACKGROUND`."""
        return NOTE_RANKS.get(self.code, BACKGROUND)


class Reason(Struct, frozen=True, kw_only=True):
    """Why a searched setting has its value and not another one.

    `saved_bytes`: by how much the largest peak falls, below 0 if it grows; `speed`: how many times as fast;
    `fits_alone`: it fits, and the other value does not; `gathered_bytes`: of the whole model, which ZeRO-3 gathers on
    each GPU to generate with the other value; 0 for other settings.
    """

    setting: str
    value: Value
    other: Value
    saved_bytes: int
    speed: float
    fits_alone: bool
    gathered_bytes: int = 0


Verdict = Literal["fits", "tight", "does_not_fit"]


class Estimate(Struct, frozen=True, kw_only=True):
    """Memory and speed of a candidate.

    `fits`: on every GPU the upper bound of the peak is within the capacity, and on a node the host memory is enough.
    `tight`: the upper bound is not, but it is more likely to run than not (planner/confidence.py, `EDGE_RISK`),
    or it leaves a node little of its host memory (`host_tight`); a plan that found nothing safer takes it as one that
    fits (planner/estimation.py, `accepted`).
    """

    candidate: Candidate
    fits: bool
    fit_probability: float
    evidence: Evidence
    gpus: tuple[GpuMemory, ...]
    host_peak_bytes: int  # on one node
    host_capacity_bytes: int
    throughput: Throughput
    reasons: tuple[Reason | Note, ...]
    versions: tuple[tuple[str, str], ...] = ()  # of the libraries in a probe
    device: ProbedOn = "none"  # that a probe of it ran on
    tight: bool = False
    host_tight: bool = False

    @property
    def verdict(self) -> Verdict:
        return "tight" if self.tight else "fits" if self.fits else "does_not_fit"

    @property
    def over_bytes(self) -> int:
        """Bytes by which the upper bound of the peak exceeds the capacity on the worst GPU; 0 or less if it fits."""
        return max(gpu.interval_bytes[1] - gpu.capacity_bytes for gpu in self.gpus)

    @property
    def host_over_bytes(self) -> int:
        """Bytes by which the host memory of a node is too small; 0 or less if it is enough."""
        return self.host_peak_bytes - self.host_capacity_bytes

    @property
    def distance(self) -> tuple[bool, int, int]:
        """Sort key of candidates that do not fit: tight ones first, bytes too many on the worst GPU, those on a node.

        Host memory is the easier one to add.
        """
        return not self.tight, max(self.over_bytes, 0), max(self.host_over_bytes, 0)


class PhaseDifference(Struct, frozen=True, kw_only=True):
    """One phase of a probed candidate on its heaviest GPU.

    `measured_bytes`: all bytes in use. `needed_bytes`: the same without cached blocks that the allocator would have
    returned under pressure; compare it with `expected_bytes`, the estimate.
    """

    name: Phase
    expected_bytes: int
    measured_bytes: int
    needed_bytes: int

    @property
    def error(self) -> float:
        """Relative error of the expectation, expected / needed - 1: below 0 if too little was expected."""
        return self.expected_bytes / self.needed_bytes - 1
