"""Text of a plan beside its numbers: reasons for its settings, limits of batch and length, and notes for the user."""

from collections.abc import Callable, Iterator

from msgspec.structs import replace

from planner.candidate import BITSANDBYTES, FLASH, Candidate
from planner.estimate import estimate
from planner.gpus.cluster import USUAL_NETWORK_BYTES_PER_SECOND
from planner.jobs.job import effective_batch_size
from planner.jobs.settings import is_shown
from planner.methods import METHODS, KbitPreparation
from planner.models.architectures.image_tower import has_image_tower, image_tower, needs_image_size
from planner.quantities import Estimate
from planner.search.binary_search import largest
from planner.search.fit import estimate_or_none
from planner.search.knobs import SearchProblem, attention
from planner.search.sizes import LENGTH_STEP, batch_sizes, length_field, length_limit, with_length
from planner.units import GIB, format_count, format_gib

# Smaller differences are left out of reasons and notes.
MIN_REPORTED_BYTES = GIB // 4
DISPLAY_CARD_BYTES = 12 * GIB  # consumer cards up to this size are often the only one in a computer
MIN_REPORTED_SPEEDUP = 1.05

# Settings that a reason is given for, each with its other values. The best candidate is compared with the first of
# these values that it does not have.
OTHER_VALUES: dict[str, tuple[object, ...]] = {
    "dtype": ("float32",),
    "attn_implementation": ("sdpa",),
    "gradient_checkpointing": (True, False),
    "sharding": ("ddp",),
    "vllm_enable_sleep_mode": (False, True),
    "ds3_gather_for_generation": (True, False),
}


# Weights that a trainer casts to bfloat16, by its k-bit preparation.
CAST: dict[KbitPreparation, str] = {
    "none": "adapters", "embeddings_and_head": "embeddings and head", "everything_unquantized": "everything unquantized"
}  # fmt: skip


# -- reasons -----------------------------------------------------------------------------------------------------------


def reasons(best: Estimate, problem: SearchProblem) -> tuple[str, ...]:
    """Return one line for each searched setting that matters: the memory and speed it gains over its other value.

    Example: "gradient_checkpointing true instead of false: saves 12.3 GiB, 0.78 times the speed".
    """
    found = []
    for name, others in OTHER_VALUES.items():
        value = getattr(best.candidate, name)
        other = next((each for each in others if each != value), None)
        if other is None or name in problem.job.pinned or not is_applicable(name, best.candidate, problem):
            continue
        answer = estimate_or_none(replace(best.candidate, **{name: other}), problem)
        if answer is not None and (effect := describe_difference(best, answer, problem)):
            found.append(
                f"{name} {format_value(value)} instead of {format_value(other)}: {effect}{gather_cost(name, answer)}"
            )
    return tuple(found)


def gather_cost(name: str, other: Estimate) -> str:
    """Describe the bytes of the whole model that ZeRO-3 gathers on each GPU to generate; empty for other settings."""
    if name != "ds3_gather_for_generation" or not other.candidate.ds3_gather_for_generation:
        return ""
    rollout = next(phase for phase in other.gpus[0].phases if phase.name == "rollout")
    return f"; gathering the whole model on every GPU takes {format_gib(rollout.components['communication'], 1)} there"


def is_applicable(name: str, candidate: Candidate, problem: SearchProblem) -> bool:
    """Return whether the setting has an effect and another value that the model and the cluster support."""
    needs: dict[str, bool] = {
        "attn_implementation": len(attention(problem)) > 1,
        "sharding": candidate.num_processes > 1 and not candidate.offload_optimizer,
        "vllm_enable_sleep_mode": candidate.vllm == "colocate",
        "ds3_gather_for_generation": candidate.sharding == "zero3"
        and candidate.method_row.generates
        and candidate.vllm == "off",
    }
    return needs.get(name, True)


def describe_difference(best: Estimate, other: Estimate, problem: SearchProblem) -> str:
    """Describe the memory and speed that the best gains over the other; empty if both differences are small."""
    parts = []
    saved = saved_bytes(best, other, problem)
    if abs(saved) >= MIN_REPORTED_BYTES:
        parts.append(f"{'saves' if saved > 0 else 'takes'} {format_gib(abs(saved), 1)}")
    faster = best.throughput.tokens_per_second / other.throughput.tokens_per_second
    if max(faster, 1 / faster) >= MIN_REPORTED_SPEEDUP:
        parts.append(f"{faster:.2f} times the speed")
    if parts and best.fits and not other.fits:
        parts.append("and does not fit without")
    return ", ".join(parts)


def saved_bytes(best: Estimate, other: Estimate, problem: SearchProblem) -> int:
    """Return by how many bytes the other's largest peak exceeds that of the best.

    If their evidence differs (one estimated, one measured), the estimates of both are compared instead.
    """
    if best.evidence != other.evidence:
        best, other = (estimate(answer.candidate, problem.cluster, problem.job.risk) for answer in (best, other))
    return max(gpu.peak_bytes for gpu in other.gpus) - max(gpu.peak_bytes for gpu in best.gpus)


def format_value(value: object) -> str:
    """Return a value as TRL's config writes it: `true` for True."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- limits ------------------------------------------------------------------------------------------------------------


def limits(best: Estimate, problem: SearchProblem) -> tuple[str, ...]:
    """Return up to two lines: the largest length and batch that fit, and the phase that does not fit beyond them."""
    return tuple(line for line in (length_limit_line(best, problem), batch_limit_line(best, problem)) if line)


def length_limit_line(best: Estimate, problem: SearchProblem) -> str:
    """Return a line about the largest length that fits at the best candidate's batch, in steps of 256 tokens."""
    candidate, name = best.candidate, length_field(best.candidate)
    length, room = getattr(candidate, name), length_limit(candidate)

    def at(steps: int) -> Estimate | None:
        return estimate_or_none(with_length(candidate, steps * LENGTH_STEP, problem), problem)

    def fits(steps: int) -> bool:
        answer = at(steps)
        return answer is not None and answer.fits

    steps = largest(-(-length // LENGTH_STEP), room // LENGTH_STEP, fits)
    if steps * LENGTH_STEP <= length:
        longer = describe_shortage(at(-(-length // LENGTH_STEP) + 1), best.candidate)
        return f"{name} {format_count(length)} is as long as this batch allows; beyond that {longer}"
    reached = f"{name} up to {format_count(steps * LENGTH_STEP)} at this batch{evidence_suffix(at(steps), best)}"
    return (
        f"{reached}, which is as far as the model goes"
        if (steps + 1) * LENGTH_STEP > room
        else f"{reached}; beyond that {describe_shortage(at(steps + 1), best.candidate)}"
    )


def batch_limit_line(best: Estimate, problem: SearchProblem) -> str:
    """Return a line about the next larger batch: it fits, or which phase does not; empty if the job allows none."""
    candidate = best.candidate
    sizes = batch_sizes(candidate, problem.job)
    larger = [size for size in sizes.values if size[0] > candidate.per_device_train_batch_size]
    if not larger:
        return ""
    following = sizes.build(larger[0])
    answer = estimate_or_none(following, problem)
    batch = f"per_device_train_batch_size {following.per_device_train_batch_size}"
    if answer is not None and answer.fits:
        return f"{batch} fits too and is no faster{evidence_suffix(answer, best)}"
    if answer is None and following.vllm == "off":
        return f"{batch} is not estimated: {NOT_MEASURED}"
    return f"{batch} does not fit: {describe_shortage(answer, following)}{evidence_suffix(answer, best)}"


def evidence_suffix(answer: Estimate | None, best: Estimate) -> str:
    """Return the evidence of an answer, such as " (estimated)", if the best has another one; empty otherwise."""
    return "" if answer is None or answer.evidence == best.evidence else f" ({answer.evidence})"


NOT_MEASURED = "this model's layers have no formulas, and are not measured with these settings"


def describe_shortage(answer: Estimate | None, candidate: Candidate) -> str:
    """Describe why an answer does not fit: the heaviest phase of the fullest GPU, the node, or the engine."""
    if answer is None:
        return NOT_MEASURED if candidate.vllm == "off" else "the vLLM engine would not start"
    if answer.over_bytes <= 0 < answer.host_over_bytes:
        return f"a node needs {format_gib(answer.host_peak_bytes, 1)} of main memory"
    tightest = max(answer.gpus, key=lambda gpu: gpu.interval_bytes[1] - gpu.capacity_bytes)
    bound = (
        f", up to {format_gib(tightest.interval_bytes[1], 1)}" if tightest.peak_bytes <= tightest.capacity_bytes else ""
    )
    return f"the {tightest.peak_phase.replace('_', ' ')} peaks at {format_gib(tightest.peak_bytes, 1)}{bound}"


# -- notes -------------------------------------------------------------------------------------------------------------


def notes(best: Estimate, problem: SearchProblem) -> tuple[str, ...]:
    """Return the warnings about a candidate, one line each, in the order of `NOTES`."""
    return tuple(line for note in NOTES for line in note(best, problem))


def about_dtype(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """Note that TRL loads weights in float32 by default, and that 16-bit weights round small updates away."""
    candidate = best.candidate
    if candidate.dtype == "float32" or "dtype" in problem.job.pinned:
        return
    other = estimate_or_none(replace(candidate, dtype="float32"), problem)
    more = saved_bytes(best, other, problem) if other is not None else 0
    if more >= MIN_REPORTED_BYTES:
        yield (
            f"TRL loads in float32 unless dtype is set: that would need {format_gib(more, 1)} more; "
            f"the plan sets {candidate.dtype}"
        )
    if candidate.tuning == "full":
        yield "16-bit weights without a float32 copy round small updates away: float32 ones would not fit here"


def about_precision(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """Note that the GPU has no bfloat16."""
    gpu = problem.cluster.gpu
    if not gpu.supports_bf16:
        yield f"{gpu.name} has no bfloat16: the plan trains in fp16 (bf16 false, fp16 true)"


def about_display(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """Note that a display takes a part of a small consumer card, unless the free memory was given."""
    gpu = problem.cluster.gpu
    alone = problem.cluster.num_gpus == 1 and gpu.free_bytes == gpu.total_bytes
    if alone and gpu.name.startswith("RTX") and gpu.total_bytes <= DISPLAY_CARD_BYTES:
        yield (
            f"if this card also drives a display, that takes a part of the {format_gib(gpu.total_bytes, 1)}: give what "
            "nvidia-smi shows as free with --free-memory"
        )


def about_images(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """Note that rows of text are planned for a model that takes images, too, or that their mask is dropped."""
    tower = image_tower(problem.job.model, best.candidate.image_size) if best.candidate.images_per_row else None
    if tower is not None and tower.masks_text and best.candidate.attn_implementation in FLASH:
        name = best.candidate.attn_implementation
        yield f"with {name} the tokens of an image see only those before them; sdpa keeps their mask"
    if not problem.job.model.vision_params or best.candidate.images_per_row:
        return
    counted = has_image_tower(problem.job.model) and METHODS[problem.job.method].counts_images
    size = " --image-size 1024x768" if needs_image_size(problem.job.model) else ""
    flag = f": --images-per-row 1{size}" if counted else ""
    yield f"rows of text are planned: images and the passes of the vision tower are not counted{flag}"


def about_network(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """Note the speed that is assumed between nodes."""
    cluster = problem.cluster
    if best.candidate.num_nodes > 1 and cluster.network_bytes_per_second == USUAL_NETWORK_BYTES_PER_SECOND:
        yield "the network of each node is taken as 400 Gb/s: give yours with --network"


def about_cache(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """Note that `generate` has no KV cache."""
    if best.candidate.generates_without_cache:
        yield (
            f"{best.candidate.method} generates without a KV cache, since TRL turns it off under gradient "
            "checkpointing: every token takes a forward pass over the whole row"
        )


def about_attention(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """Note the packages of FlashAttention 2, and the mask that sdpa builds for padded batches."""
    candidate = best.candidate
    if candidate.attn_implementation == "flash_attention_2" and "attn_implementation" not in problem.job.pinned:
        yield (
            "attn_implementation flash_attention_2 needs no build: without the flash-attn package, transformers "
            "takes kernels-community/flash-attn2 through the kernels package"
        )
    if candidate.attn_implementation != "sdpa" or not candidate.pads:
        return
    peak = estimate(candidate, problem.cluster).gpus[0].peak
    if peak.components.get("attention_scores", 0) >= MIN_REPORTED_BYTES:
        yield (
            "batches with padding make sdpa build a mask of rows x length squared in every layer; "
            "--no-padded if yours have none"
        )


def about_adapters(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """Note the order in which TRL and PEFT prepare a model for adapters; preparing it by hand often goes wrong."""
    candidate = best.candidate
    if candidate.tuning != "lora":
        return
    steps = [
        f"load the model ({candidate.quantization})" if candidate.quantization != "none" else "load the model",
        "get_peft_model",
    ]
    if candidate.quantization in BITSANDBYTES:
        preparation = candidate.method_row.kbit_preparation
        steps[1:1] = ["prepare_model_for_kbit_training"] if preparation != "none" else []
        steps.append(f"{CAST[preparation]} cast to bfloat16")
    steps += ["train.py casts them to float32"] if candidate.float32_adapters else []
    steps += ["enable_input_require_grads"] if candidate.gradient_checkpointing else []
    reentrant = "reentrant, which PEFT under ZeRO-3 needs" if candidate.sharding == "zero3" else "non-reentrant"
    steps += [
        f"checkpointing at train(), {reentrant}"
        if candidate.gradient_checkpointing
        else f"train() (checkpointing off; were it on, {reentrant})"
    ]
    yield f"TRL prepares the model itself, in this order: {', '.join(steps[:-1])}, {steps[-1]}"
    if candidate.float32_adapters:
        yield (
            "TRL casts the adapters to bfloat16, and fp16's GradScaler stops at bfloat16 gradients: plan export "
            "writes a train.py that casts them back; in a script of your own, set "
            "parameter.data = parameter.data.float() for each trained parameter before train()"
        )
    if candidate.quantization in BITSANDBYTES:
        yield (
            "so pass peft_config and an untouched model; one wrapped by hand needs enable_input_require_grads "
            "before checkpointing, or no gradient arrives"
        )
    if candidate.quantization in ("nf4", "nf4-double") and candidate.vllm != "off":
        yield "vLLM dropped bitsandbytes after 0.22, and TRL asks for it with QLoRA: install a vLLM that still has it"


def about_rank(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """Note that the LoRA rank is the largest of the job's ranks that fits."""
    ranks = problem.job.lora_ranks
    if ranks and best.candidate.tuning == "lora":
        yield f"lora_r {best.candidate.lora_r} is the largest of {', '.join(map(str, sorted(ranks)))} that fits"


def about_versions(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """Note that the method left TRL, came to it later than the job's release, or is experimental there."""
    row = best.candidate.method_row
    if row.first_trl == best.candidate.trl_version != problem.job.trl_version:
        yield f"{row.name} came to TRL with {row.first_trl}: the plan is for trl {row.first_trl}"
    if row.last_trl != "current":
        yield (
            f"{row.name} left TRL after {row.last_trl}: the plan is for trl {row.last_trl}; "
            f"install trl<={row.last_trl}.*"
        )
    elif row.experimental:
        yield f"{row.trainer} is in trl.experimental: it may change without notice"


def about_context(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """Note rows that are longer than the context that the model was trained with."""
    candidate = best.candidate
    positions = candidate.model.max_position_embeddings
    if 0 < positions < candidate.row_tokens:
        yield (
            f"rows of {format_count(candidate.row_tokens)} tokens are longer than the {format_count(positions)} "
            f"positions of {candidate.model.id} (max_position_embeddings), which it was trained with"
        )


def about_data(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """Note the assumed prompt length, and the longest sequence of the vLLM engine."""
    candidate = best.candidate
    unbounded = candidate.method_row.generates and not candidate.method_row.bounded_rows
    if unbounded and "prompt_length" not in problem.job.pinned:
        yield (
            f"prompts are taken to be up to {format_count(candidate.prompt_length)} tokens; "
            "TRL does not cut them: give --prompt-length for yours"
        )
    if candidate.vllm != "colocate" or not is_shown(candidate, "vllm_max_model_length"):
        return
    if candidate.vllm_max_model_length == 0:
        yield (
            f"vLLM takes the model's whole context of {format_count(candidate.model.max_position_embeddings)} tokens: "
            "vllm_max_model_length is not set"
        )
    elif "vllm_max_model_length" not in problem.job.pinned:
        yield (
            f"vllm_max_model_length {format_count(candidate.vllm_max_model_length)} is prompt and completion; "
            f"TRL's default is the model's whole context, {format_count(candidate.model.max_position_embeddings)}"
        )


def about_batch(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """Note an effective batch that differs from the one on all GPUs, because a vLLM server takes some of them."""
    candidate, on_all_gpus = best.candidate, effective_batch_size(problem.job, problem.cluster)
    share = candidate.per_device_train_batch_size * candidate.gradient_accumulation_steps
    if problem.job.optimize == "throughput" and candidate.effective_batch_size != on_all_gpus:
        yield (
            f"an optimizer step sees {format_count(candidate.effective_batch_size)} samples, {share} for each of "
            f"{candidate.num_processes} processes; on all {problem.cluster.num_gpus} GPUs it would be "
            f"{format_count(on_all_gpus)}: say --effective-batch-size to keep one"
        )


def about_idle(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """Note GPUs that no engine can use: the tensor parallel size does not divide the GPUs of a node."""
    candidate = best.candidate
    idle = problem.cluster.num_gpus - candidate.num_processes - candidate.server_gpus
    if idle > 0 and candidate.vllm == "colocate" and "num_processes" not in problem.job.pinned:
        size = candidate.vllm_tensor_parallel_size
        yield f"{idle} of {problem.cluster.num_gpus} GPUs are idle: engines of {size} on the others are faster"


def about_sources(best: Estimate, problem: SearchProblem) -> Iterator[str]:
    """Return the notes of the model catalogue about the model, such as an uncertain source."""
    yield from (f"{problem.job.model.id}: {note}" for note in problem.job.model.notes)


NOTES: tuple[Callable[[Estimate, SearchProblem], Iterator[str]], ...] = (
    about_dtype,
    about_precision,
    about_display,
    about_images,
    about_network,
    about_cache,
    about_attention,
    about_adapters,
    about_rank,
    about_versions,
    about_context,
    about_data,
    about_batch,
    about_idle,
    about_sources,
)
