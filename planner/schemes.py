"""The table of the ways to distribute a model and its states (`SCHEMES`): facts that need no sizes.

What a scheme holds on a GPU at each moment is its contract, planner/memory/schemes/.
"""

from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

Sharding = Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp2", "fsdp1", "distributed", "tensor"]


Casts = Literal["nothing", "autocast", "module", "gathered"]  # see `SchemeRow.casts`


class SchemeRow(Struct, frozen=True, kw_only=True):
    """One row of the table `SCHEMES`: names, what is divided among the GPUs, and where a library behaves otherwise."""

    words: str
    spelling: dict[str, str | int]  # in accelerate's launch file. Source: trl/accelerate_configs/*.yaml
    launched: bool = True  # False: one process, without a launcher
    section: Literal["", "deepspeed_config", "fsdp_config"] = ""  # of accelerate's launch file, for the library
    stage: int = 0  # of DeepSpeed's ZeRO; 0: another library
    traced: str = ""  # the name under which diagnosis knows files of the library in a traceback
    offload_setting: str = ""  # accelerate's own name of `offload_param`
    # The setting with which GPUs share a row: ring attention divides its tokens, Ulysses the heads.
    shares_rows: Literal["", "cp_size", "sp_size"] = ""

    # what is divided
    whole: bool = False  # nothing: every GPU has the model and all its states
    shards_gradients: bool = False  # so that GPUs wait for each other in every micro-step
    shards_weights: bool = False
    shards_4bit: Literal["never", "as floats", "always"] = "never"  # as floats: see `bnb_4bit_quant_storage`
    flat_partitions: bool = False  # of gradients and states, in one buffer per optimizer group
    shards_evaluated: bool = True  # what accelerate prepares for evaluation: a teacher, a reward model

    # When a second NCCL communicator exists beside the default one: for reductions; or only to broadcast a quantized
    # base, which is loaded whole, and to look for overflows of fp16. Source: deepspeed 0.19.8, utils/groups.py,
    # `_clone_world_group`, runtime/engine.py, `_broadcast_model`, zero/stage3.py, `has_overflow`;
    # deepspeedai/DeepSpeed#7680 ("wastes probably 0.5GB per gpu").
    own_group: Literal["never", "to reduce", "to broadcast"] = "never"

    # Gradients: one buffer for all of the rank's, allocated at the start; one that is allocated with the first reduced
    # gradient; gradients reduced after the backward pass. Source: deepspeed 0.19.8, zero/stage3.py,
    # `_setup_for_real_optimizer` (`grad_partitions_flat_buffer`); zero/stage_1_and_2.py, `copy_grads_in_partition`,
    # `reduce_gradients`.
    gradient_buffer: bool = False
    partition_buffer: bool = False
    reduces_after: bool = False
    # Transformers divides the model while it loads it: with FSDP2, the experts of a layer too, or every layer. Source:
    # transformers 5.23, distributed/configuration_utils.py, `DistributedConfig`.
    loads_divided: bool = False
    divides_experts: bool = False
    divides_layers: bool = False  # so that all GPUs have one batch together (tensor parallelism)
    # Units of modules are gathered in one buffer, copied to their parameters, and reduced as one. Source: torch 2.13,
    # distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_all_gather_copy_out`, `foreach_reduce`.
    units: bool = False
    # A unit is one flat parameter, and what no layer holds is one unit, the root. Source: torch 2.13,
    # distributed/fsdp/_flat_param.py, `FlatParamHandle`.
    flat_units: bool = False
    searched: bool = True  # without being asked for
    slack_as: Sharding | None = (
        None  # the scheme whose recorded slack it takes (planner/memory/slack.py); None: its own
    )

    # Mixed precision: accelerate's autocast around the forward pass; a cast of the module to 16 bits, which then needs
    # float32 master weights; or a cast of gathered parameters, whose shards are float32 where they are trained.
    # Source: accelerate 1.15, accelerator.py, `Accelerator.prepare_model`; deepspeed 0.19.8, runtime/engine.py,
    # `_configure_distributed_model`; accelerate 1.15, utils/dataclasses.py,
    # `FullyShardedDataParallelPlugin.set_mixed_precision`.
    casts: Casts = "autocast"

    # torch's Reducer: buckets of all gradients, and an error if a parameter gets none. Source: torch 2.13,
    # csrc/distributed/c10d/reducer.cpp.
    reducer: bool = False
    # Gradients of all micro-steps but the last stay whole. Source: see `Candidate.keeps_whole_gradients`.
    defers_reduction: bool = False
    # Weights are divided while they are created, in float32 unless mixed precision is on; TRL refuses to copy them.
    # Source: deepspeed 0.19.8, runtime/zero/partition_parameters.py, `Init`.
    creates_sharded: bool = False
    # Calls of modules are traced, and parameters gathered ahead. Source: deepspeed 0.19.8,
    # runtime/zero/partitioned_param_coordinator.py.
    traces_modules: bool = False
    regathers: bool = False  # parameters are gathered once more to recompute a checkpointed layer
    # `ds3_gather_for_generation` has an effect. Source: trl 1.16, models/utils.py, `unwrap_model_for_generation`.
    gathers_to_generate: bool = False
    # Adapters are trained with reentrant checkpointing. Source: trl 1.16, trainer/sft_trainer.py,
    # `SFTTrainer.__init__`.
    reentrant_with_adapters: bool = False
    # Parameters are DTensors, at which bitsandbytes' optimizers and states of 4-bit weights stop.
    dtensors: bool = False
    # A model with adapters is on the CPU until training starts, and TRL loads a reference also beside precomputed
    # log-probabilities. Source: trl 1.16, trainer/dpo_trainer.py, `DPOTrainer.__init__`, `_precompute_ref_logps`.
    prepares_late: bool = False

    @property
    def autocasts(self) -> bool:
        """True if accelerate puts the forward pass under autocast, and its outputs into float32.

        It does so with a model that it gives to FSDP 1, too, whose units also cast what they gather.
        Source: accelerate 1.15, accelerator.py, `Accelerator.prepare_model`, `_prepare_fsdp2`, `_prepare_deepspeed`.
        """
        return self.casts == "autocast" or self.flat_units

    @property
    def ring(self) -> bool:
        """True if GPUs that share a row send its keys and values around (context parallelism)."""
        return self.shares_rows == "cp_size"

    @property
    def ulysses(self) -> bool:
        """True if GPUs that share a row have each some of the heads."""
        return self.shares_rows == "sp_size"


FSDP2 = SchemeRow(
    words="FSDP2",
    spelling={"distributed_type": "FSDP", "fsdp_version": 2},
    section="fsdp_config",
    traced="fsdp",
    offload_setting="fsdp_offload_params",
    shares_rows="cp_size",
    shards_gradients=True,
    shards_weights=True,
    shards_4bit="as floats",
    casts="gathered",
    shards_evaluated=False,
    units=True,
    defers_reduction=True,
    dtensors=True,
    prepares_late=True,
)
SCHEMES: dict[Sharding, SchemeRow] = {
    "none": SchemeRow(words="one GPU", spelling={"distributed_type": "NO"}, launched=False, whole=True),
    "ddp": SchemeRow(words="DDP", spelling={"distributed_type": "MULTI_GPU"}, whole=True, reducer=True),
    "zero1": SchemeRow(
        words="ZeRO-1",
        spelling={"distributed_type": "DEEPSPEED", "zero_stage": 1},
        section="deepspeed_config",
        stage=1,
        flat_partitions=True,
        own_group="to reduce",
        reduces_after=True,
        traced="zero2",
        casts="module",
    ),
    "zero2": SchemeRow(
        words="ZeRO-2",
        spelling={"distributed_type": "DEEPSPEED", "zero_stage": 2},
        section="deepspeed_config",
        stage=2,
        flat_partitions=True,
        own_group="to reduce",
        partition_buffer=True,
        traced="zero2",
        shards_gradients=True,
        casts="module",
    ),
    "zero3": SchemeRow(
        words="ZeRO-3",
        spelling={"distributed_type": "DEEPSPEED", "zero_stage": 3},
        section="deepspeed_config",
        stage=3,
        traced="zero3",
        shares_rows="sp_size",
        shards_gradients=True,
        shards_weights=True,
        shards_4bit="always",
        casts="module",
        own_group="to broadcast",
        gradient_buffer=True,
        creates_sharded=True,
        traces_modules=True,
        regathers=True,
        gathers_to_generate=True,
        reentrant_with_adapters=True,
    ),
    "fsdp2": FSDP2,
    "fsdp1": replace(
        FSDP2,
        words="FSDP 1",
        spelling={"distributed_type": "FSDP", "fsdp_version": 1},
        shares_rows="",
        dtensors=False,
        flat_units=True,
        searched=False,
        slack_as="fsdp2",
    ),
    "distributed": SchemeRow(
        words="FSDP2 of Transformers",
        spelling={"distributed_type": "MULTI_GPU", "distributed_config": "fsdp"},
        traced="fsdp",
        shards_gradients=True,
        shards_weights=True,
        units=True,
        defers_reduction=True,
        dtensors=True,
        loads_divided=True,
        searched=False,
        divides_experts=True,
    ),
    "tensor": SchemeRow(
        words="tensor parallelism of Transformers",
        spelling={"distributed_type": "MULTI_GPU", "distributed_config": "tp"},
        dtensors=True,
        loads_divided=True,
        searched=False,
        divides_layers=True,
    ),
}
# Setting -> the sharding under which GPUs share rows with it: accelerate's context parallelism divides the tokens
# (`cp_size`), Ulysses the heads (`sp_size`). Source: accelerate 1.15, parallelism_config.py and accelerator.py.
SHARDING_OF_SHARED_ROWS: dict[str, Sharding] = {
    row.shares_rows: name for name, row in SCHEMES.items() if row.shares_rows
}


def layer_gpus_of(sharding: Sharding, processes: int, tp_size: int) -> int:
    """Return the GPUs that share each layer, and so have one batch together (tensor parallelism)."""
    row = SCHEMES[sharding]
    return processes if row.divides_layers else tp_size if row.divides_experts else 1


def batches_of(sharding: Sharding, processes: int, row_gpus: int, tp_size: int) -> int:
    """Return the batches of one micro-step: GPUs that share rows or layers have one together."""
    return max(processes // (row_gpus * layer_gpus_of(sharding, processes, tp_size)), 1)
