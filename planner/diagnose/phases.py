"""Advice that depends on where a run stopped: what helps while a model loads does nothing for a batch."""

from collections.abc import Iterator

from planner.diagnose.incident import Incident
from planner.quantities import Phase
from planner.units import format_count, format_gib

FIRST_STEPS = 3  # by then optimizer states exist, and the allocator holds what a step needs
BATCH = (
    "a smaller per_device_train_batch_size with more gradient_accumulation_steps, a shorter max_length "
    "(max_completion_length where it generates), or gradient_checkpointing=true"
)
LOADING = (
    "only the model is loading, which no batch size and no length changes: a larger GPU, 4-bit weights "
    "(load_in_4bit=true), ZeRO-3 or FSDP over more GPUs, or offloading"
)
QUANTIZING = (
    "only the model is loading, in few bits already, which no batch size and no length changes: a larger GPU, more "
    "GPUs that share it (ZeRO-3, FSDP), a smaller model; see nvidia-smi for what else holds the GPU"
)
ENGINE_STARTS = (
    "vLLM was starting beside what the GPU held: a smaller vllm_gpu_memory_utilization, "
    "vllm_enable_sleep_mode=true, or vllm_mode=server on GPUs of its own"
)
# Source: transformers 5.23, trainer.py, `evaluation_loop`, and training_args.py; accelerate 1.15,
# utils/fsdp_utils.py; deepspeed 0.19.8, runtime/engine.py, `save_16bit_model`.
KEEPS_NO_LOGITS = (
    "logits that an evaluation keeps of every batch: prediction_loss_only=true keeps none, eval_accumulation_steps=1 "
    "moves them to main memory, preprocess_logits_for_metrics makes them smaller"
)
EVAL_BATCH = "a smaller per_device_eval_batch_size, which is 8 unless it is set, whatever training's is"
SAVING = (
    "a checkpoint in one piece gathers the model, and FSDP's the optimizer too: fsdp_state_dict_type: "
    "SHARDED_STATE_DICT or stage3_gather_16bit_weights_on_model_save: false write shards"
)
SAVE_ONLY_MODEL = "save_only_model=true writes no optimizer states, but a run cannot go on from it"
# Phase -> advice for a GPU, the one most likely to help first.
GPU_ADVICE: dict[Phase, tuple[str, ...]] = {
    "load": (LOADING,),
    "rollout": (
        "a shorter max_completion_length, or fewer sequences at a time: a smaller per_device_train_batch_size or "
        "generation_batch_size",
    ),
    "score": (BATCH,),
    "forward": (BATCH,),
    "loss": ("use_liger_kernel=true makes no tensor of all logits, where the trainer has such a loss", BATCH),
    "backward": (BATCH,),
    "optimizer_step": (
        "the optimizer's states and copies, which no batch size changes: LoRA, an 8-bit or paged optimizer "
        "(optim=adamw_8bit, paged_adamw_8bit), or ZeRO or FSDP over more GPUs",
    ),
    "evaluation": (EVAL_BATCH, KEEPS_NO_LOGITS),
    "weight_sync": (
        "the weights are gathered, and merged if there are adapters, beside the engine: a smaller "
        "vllm_gpu_memory_utilization, or vllm_mode=server on GPUs of its own",
    ),
    "save": (SAVING, SAVE_ONLY_MODEL),
}
HOST_LOADING = (
    "each process first loads the model's weights into main memory, and offloaded states and parameters stay there: "
    "give what a node has with --host-memory, and see the plan's line `host`"
)
HOST_ADVICE: dict[Phase | None, tuple[str, ...]] = {
    "evaluation": (
        "eval_accumulation_steps moves logits to main memory: prediction_loss_only=true keeps none",
        HOST_LOADING,
    ),
    "save": (SAVING, SAVE_ONLY_MODEL),
}


def advice_for_gpu(incident: Incident) -> Iterator[str]:
    """What helps in the phase in which a GPU had no memory; nothing if the phase is unknown."""
    yield from _growth(incident)
    if incident.activity == "engine_starts":
        yield ENGINE_STARTS
    elif incident.activity == "joins_logits":
        yield KEEPS_NO_LOGITS
    elif incident.activity == "quantizes" and incident.phase == "load":
        yield QUANTIZING
    elif incident.phase is not None:
        yield from GPU_ADVICE[incident.phase]


def advice_for_host(incident: Incident) -> Iterator[str]:
    """What helps in the phase in which main memory ran out."""
    yield from HOST_ADVICE.get(incident.phase, (HOST_LOADING,))


def step_of(incident: Incident) -> str:
    """The training step that ran, as text; empty if the log has none."""
    beside = incident.beside
    return f"step {format_count(beside.step)} of {format_count(beside.steps)}" if beside.step else ""


def _growth(incident: Incident) -> Iterator[str]:
    """Why a step needs more than those before it."""
    beside = incident.beside
    if incident.phase in ("load", "save", "evaluation"):
        return
    if beside.memory:
        first, last = (format_gib(size, 1) for size in (beside.memory[0], beside.memory[-1]))
        if beside.leaks:
            yield (
                f"memory grew by about the same in every step, from {first} to {last}: a leak, such as losses that are "
                "kept without detach() or item()"
            )
        else:
            yield (
                f"memory grew from {first} to {last} in jumps, as longer rows or completions came, which is no leak: "
                "the longest must fit, so plan with --max-length or --max-completion-length at their limit"
            )
    elif beside.step > FIRST_STEPS:
        yield (
            f"{format_count(beside.step - 1)} steps had fitted: a longer row came. The longest must fit, so plan "
            "with --max-length or --max-completion-length at their limit"
        )
