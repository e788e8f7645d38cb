"""Keys of the two caches of an estimate: the settings that decide its states, and those that decide its training.

A search tries many batches with the same states, and many shares of the GPU for a vLLM engine beside the same training.
The results of `state_memory` and `training_estimate` are cached under a type that holds every setting that the formulas
may read, and no other. The fields have the names of `Candidate`, so that a formula takes a key or a candidate
(`StateInput`, `TrainingInput`). A formula that reads another setting fails in mypy, and with an AttributeError in every
search; tests/test_cache_keys.py compares estimates with warm and with empty caches.

The keys are msgspec structs, because a search makes thousands of them: making one of 37 fields takes 0.8 microseconds,
and one of 46 fields as a frozen dataclass 23 (Python 3.11).
"""

from operator import attrgetter
from typing import Literal

import msgspec

from planner.candidate import (
    AttentionImplementation,
    Candidate,
    Dtype,
    Elements,
    EvaluationBatch,
    Precision,
    QuantStorage,
    RepeatedCalls,
    TableRows,
    Vllm,
)
from planner.methods import MethodName
from planner.models.lora_targets import AdapterKernel
from planner.models.shape import ModelShape
from planner.optimizers import Optimizer
from planner.quantizations import Quantization
from planner.rows.batches import Layout, Order
from planner.rows.lengths import RowLengths
from planner.schemes import Sharding
from planner.settings.tools import Tool


class StateSettings(TableRows, msgspec.Struct, frozen=True, cache_hash=True):
    """Settings that weights, adapters, gradients, optimizer states and communication depend on: no batch or lengths."""

    model: ModelShape
    method: MethodName
    trl_version: str
    tool: Tool
    tuning: Literal["full", "lora"]
    lora_r: int
    lora_target_modules: tuple[str, ...]
    lora_target_parameters: tuple[str, ...]
    lora_dropout: float
    lora_modules_to_save: tuple[str, ...]
    counted_lora_kernels: frozenset[AdapterKernel]
    use_dora: bool
    autocast_adapter_dtype: bool
    casts_loaded_adapters: bool
    dtype: Dtype
    precision: Precision
    quantization: Quantization
    bnb_4bit_quant_storage: QuantStorage
    prepare_model_for_kbit_training: bool
    trainer_casts_to_bfloat16: bool
    script_casts_to_float32: bool
    separate_reference: bool
    reference_load_dtype: str
    keeps_reference: bool
    precomputes: bool
    refers_without_adapters: bool
    averages_adapters: bool
    repeated_calls: RepeatedCalls
    rescores_samples: bool
    images_per_row: int
    accumulates: bool
    learns_again: bool
    keeps_whole_gradients: bool
    gradient_checkpointing: bool
    use_liger_kernel: bool
    use_kernels: bool
    cut_cross_entropy: bool
    use_uld_loss: bool
    optim: Optimizer
    sharding: Sharding
    num_processes: int
    num_nodes: int
    shard_gpus: int
    row_gpus: int
    layer_gpus: int
    ep_size: int
    offload_optimizer: bool
    offload_param: bool
    ds3_gather_for_generation: bool
    reduce_bucket_size: Elements
    stage3_prefetch_bucket_size: Elements
    stage3_param_persistence_threshold: Elements
    stage3_max_live_parameters: int
    stage3_max_reuse_distance: int
    sub_group_size: int
    vllm: Vllm
    sends_adapters: bool
    reward_model: ModelShape | None
    teacher_model: ModelShape | None
    teacher_load_dtype: str


class TrainingSettings(StateSettings, frozen=True, cache_hash=True):
    """Settings that the phases and the seconds of a training step depend on, without those of a vLLM engine only."""

    groups_efficiently: bool
    batches: int
    tf32: bool
    # the batch
    rows: int
    row_tokens: int
    frozen_row_tokens: int
    attention_length: int
    tokens: int
    path_tokens: int
    scores: int
    labelled_tokens: int
    image_size: str
    lengths: RowLengths | None
    completion_lengths: RowLengths | None
    rows_differ: bool
    max_length: int
    layout: Layout
    train_sampling_strategy: Order
    flattened: bool
    pads: bool
    gradient_accumulation_steps: int
    beta: float
    precompute_ref_log_probs: bool
    scored_batch: EvaluationBatch | None
    # evaluation
    evaluation: EvaluationBatch | None
    kept_eval_batches: int
    kept_eval_rows: int
    # activations and the allocator
    checkpoint_every_n_layers: int
    checkpoint_offload: bool
    activation_offloading: bool
    attn_implementation: AttentionImplementation
    expandable_segments: bool
    # generation
    samples_within_step: bool
    generation_rows: int
    generated_share: float
    prompts_differ: bool
    generates_without_cache: bool
    prompt_length: int
    max_completion_length: int
    num_generations: int
    num_value_samples: int
    steps_per_generation: int
    num_iterations: int
    scores_samples: bool
    vllm_enable_sleep_mode: bool


StateInput = StateSettings | Candidate
TrainingInput = TrainingSettings | Candidate

_state_values = attrgetter(*StateSettings.__struct_fields__)
_training_values = attrgetter(*TrainingSettings.__struct_fields__)


def state_settings(settings: TrainingInput) -> StateSettings:
    """The settings of a candidate, or of its training, that its states depend on."""
    return StateSettings(*_state_values(settings))


def training_settings(candidate: TrainingInput) -> TrainingSettings:
    """The settings of a candidate that its training depends on."""
    return TrainingSettings(*_training_values(candidate))
