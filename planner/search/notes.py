"""The notes on a candidate: what the user should know or do, as data; planner/report/sentences.py words them."""

from collections.abc import Callable, Iterator
from contextlib import suppress

from msgspec.structs import replace

from planner.candidate import FLASH, SINCE_TORCH, Candidate, in_float16, usual_values
from planner.errors import InputError
from planner.estimation import engine_of, estimate, lacks_unmasked_kernel, rollout_rows, worst_batch
from planner.gpus.cluster import USUAL_NETWORK_BYTES_PER_SECOND, Cluster
from planner.jobs.config_changes import unread_note, unread_settings
from planner.jobs.job import effective_batch_size
from planner.jobs.settings import is_shown
from planner.jobs.stop import whole_model_setting
from planner.jobs.stops import CAPTURED_SEGMENTS, HEAD_IN_FLIGHT, IMAGES_EXPANDED_TWICE, UNMERGED
from planner.memory.dtypes import DTYPE_BYTES
from planner.methods import METHODS, release
from planner.models.image_tower import has_image_tower, image_tower, needs_image_size
from planner.models.lora_targets import text_targets
from planner.models.recurrent import fast_kernels
from planner.quantities import Estimate, Note
from planner.search.explain import MIN_REPORTED_BYTES, saved_bytes, would_measure_float32
from planner.search.fit import estimate_or_none, impractical
from planner.search.knobs import ONE_PROCESS, SearchProblem, copies_logits
from planner.search.row_lengths import about_rows
from planner.search.search import next_split
from planner.search.sizes import LENGTH_STEP
from planner.search.variations import search_with
from planner.settings.setting import Value
from planner.settings.vllm_releases import SINCE_VLLM, taken_by_trl
from planner.throughput.generation import generation_seconds
from planner.throughput.step import throughput
from planner.throughput.work import policy_work
from planner.units import GIB

DISPLAY_CARD_BYTES = 12 * GIB  # consumer cards up to this size are often the only one in a computer
SHOWN_PROMPTS = 1000  # in the sentence of `about_values`
SMALL_ENGINE_SHARE = 0.5  # of TRL's default share of the card; judged


def notes(best: Estimate, problem: SearchProblem) -> tuple[Note, ...]:
    """Return the warnings about a candidate in the order of `NOTES`."""
    return tuple(note for about in NOTES for note in about(best, problem))


def about_dtype(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note that TRL loads weights in float32 by default, and that 16-bit weights round small updates away."""
    candidate = best.candidate
    if candidate.dtype == "float32" or "dtype" in problem.job.pinned or would_measure_float32(candidate):
        return
    other = estimate_or_none(replace(candidate, dtype="float32"), problem)
    more = saved_bytes(best, other, problem) if other is not None else 0
    if more >= MIN_REPORTED_BYTES:
        yield Note("float32_by_default", {"more_bytes": more, "dtype": candidate.dtype})
    if candidate.tuning == "full":
        yield Note("rounds_small_updates")


def about_precision(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note that the GPU has no bfloat16, and that a model overflows float16."""
    gpu, candidate = problem.cluster.gpu, best.candidate
    if not gpu.supports_bf16:
        yield Note("no_bfloat16", {"gpu": gpu.name})
    if in_float16(candidate.precision, candidate.dtype) and candidate.model.architecture.overflows_float16:
        whole = not candidate.quantization_row.quantized
        values = {"model": candidate.model.id, "bfloat16": gpu.supports_bf16, "float32": whole}
        yield Note("float16_overflows", values)


def about_display(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note that a display takes a part of a small consumer card, unless the free memory was given."""
    gpu = problem.cluster.gpu
    alone = problem.cluster.num_gpus == 1 and gpu.free_bytes == gpu.total_bytes
    if alone and gpu.name.startswith("RTX") and gpu.total_bytes <= DISPLAY_CARD_BYTES:
        yield Note("display_takes_memory", {"total_bytes": gpu.total_bytes})


def about_images(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note that rows of text are planned for a model that takes images, too, or that their mask is dropped."""
    tower = image_tower(problem.job.model, best.candidate.image_size) if best.candidate.images_per_row else None
    if tower is not None and tower.masks_text and best.candidate.attn_implementation in FLASH:
        yield Note("image_mask_dropped", {"attn_implementation": best.candidate.attn_implementation})
    unpinned = "vllm" not in problem.job.pinned
    beside = replace(best.candidate, vllm="colocate")
    if unpinned and best.candidate.vllm == "off" and IMAGES_EXPANDED_TWICE.when(beside, problem.cluster):
        yield Note("engine_spoils_images", {"because": IMAGES_EXPANDED_TWICE.reason(beside, problem.cluster)})
    if not problem.job.model.vision_params or best.candidate.images_per_row:
        return
    counted = has_image_tower(problem.job.model) and METHODS[problem.job.method].images == "counted"
    size = needs_image_size(problem.job.model)
    prompts = METHODS[problem.job.method].generates
    yield Note("images_not_counted", {"can_count": counted, "needs_size": size, "in_prompts": prompts})


def about_engine(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note why there is no vLLM engine, why a small share of the GPU is enough for it, and who waits for whom."""
    candidate = best.candidate
    if candidate.vllm == "server" and best.fits:  # what does not fit has no speed
        other = next_split(best, problem)
        values = waiting_of_split(best, problem.cluster)
        if other is not None:
            speed = other.throughput.tokens_per_second / best.throughput.tokens_per_second
            values["other"] = Note("other_split", {**waiting_of_split(other, problem.cluster), "speed": speed})
        yield Note("server_samples_meanwhile" if candidate.method_row.asynchronous else "server_takes_turns", values)
    usual = usual_values(candidate.method_row, candidate.trl_version)["vllm_gpu_memory_utilization"]
    if candidate.vllm == "colocate" and candidate.vllm_gpu_memory_utilization < SMALL_ENGINE_SHARE * usual:
        budget = next(gpu for gpu in best.gpus if "engine_budget" in gpu.details).details["engine_budget"]
        values = {name: budget[name] for name in ("weights", "kv_cache", "sequences")}
        sampled = candidate.generation_rows * candidate.vllm_tensor_parallel_size
        yield Note(
            "engine_share_small",
            {"vllm_gpu_memory_utilization": candidate.vllm_gpu_memory_utilization, **values, "sampled": sampled},
        )
    without = candidate.vllm == "off" and candidate.method_row.supports_vllm and "vllm" not in problem.job.pinned
    if without and replace(candidate, vllm="colocate").engine_keeps_base:
        yield Note("engine_would_keep_base", {"bits": 4 if candidate.quantization_row.four_bit else 8})
    if without and UNMERGED.when(replace(candidate, vllm="colocate"), problem.cluster):
        yield Note("base_takes_no_adapters", {"because": UNMERGED.reason(candidate, problem.cluster)})


def about_unmerged_adapters(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note a faster trainer for a quantized base, which sends adapters to a vLLM server without merging them.

    Also note a server that samples from 16-bit weights while quantized ones are trained.
    """
    candidate, job = best.candidate, problem.job
    if candidate.sends_adapters and candidate.quantization != job.model.quantization:
        yield Note("server_not_quantized", {"quantization": candidate.quantization})
    other = candidate.method_row.asynchronous_form
    sampled = candidate.quantization_row.kept and best.fits and "vllm" not in job.pinned
    if other is None or not sampled or release(candidate.trl_version) < release(METHODS[other].first_trl):
        return
    same = {"max_completion_length": candidate.max_completion_length, "num_generations": candidate.num_generations}
    with suppress(InputError):  # a pinned setting that the other trainer lacks
        answer = search_with(replace(problem, job=replace(job, method=other)), same, best)
        if answer is not None and answer.fits:
            speed = answer.throughput.tokens_per_second
            factor = speed / best.throughput.tokens_per_second
            yield Note("sends_adapters_alone", {"method": other, "tokens_per_second": speed, "factor": factor})


def about_weight_sync(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note that an asynchronous trainer may hang when several FSDP2 processes send the whole model to its server.

    The first one gathers weights inside the transfer to vLLM, in another order of NCCL's calls than the others have.
    Source: huggingface/trl#7103, #6797; trl 1.16, experimental/async_grpo/async_grpo_trainer.py, `_streaming_iter`.
    """
    candidate = best.candidate
    gathers = candidate.scheme_row.dtensors and candidate.num_processes > 1
    if candidate.method_row.asynchronous and gathers and not candidate.sends_adapters:
        yield Note("weight_sync_hangs", {"processes": candidate.num_processes})


def waiting_of_split(answer: Estimate, cluster: Cluster) -> dict[str, object]:
    """Return the GPUs of trainer and server, and the share of a step for which each of them waits."""
    candidate, speed = answer.candidate, answer.throughput
    share = speed.seconds["generation"] / speed.step_seconds
    idle = 1 - share
    if candidate.method_row.asynchronous:
        engine = engine_of(candidate, cluster.gpu)
        rows = rollout_rows(candidate, cluster.gpu, engine)
        sampling = generation_seconds(candidate, cluster, policy_work(candidate), rows)
        idle = max(1 - sampling / speed.step_seconds, 0.0)
    return {"trainer": candidate.num_processes, "server": candidate.server_gpus, "share": share, "idle": idle}


def about_published_quantization(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note that a GPTQ or AWQ base is loaded for inference unless a script says otherwise."""
    row = best.candidate.quantization_row
    if row.kept and row.loaded_with:
        yield Note("kernels_for_inference", {"quantization": best.candidate.quantization})


def about_resuming(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note why a run does not go on from its checkpoints, or needs more memory then than there is."""
    if not best.candidate.loads_checkpoints:
        yield Note("checkpoint_not_resumed", _why_not_resumed(best.candidate))
        return
    if best.candidate.skips_no_batches:
        yield Note("batches_not_skipped")
    resumed = replace(best.candidate, resume_from_checkpoint="true")
    if best.fits and resumed.casts_loaded_adapters:
        answer = estimate_or_none(resumed, problem)
        if answer is not None and not answer.fits:
            yield Note("resume_does_not_fit", {"peak_bytes": max(gpu.peak_bytes for gpu in answer.gpus)})


def _why_not_resumed(candidate: Candidate) -> dict[str, Value]:
    """Return the values of the note `checkpoint_not_resumed`."""
    whole = candidate.whole_4bit_weights or candidate.names_weights_twice
    return {
        "second_adapter": candidate.averages_adapters,
        "only_model": candidate.scheme_row.loads_divided,
        "scaled": candidate.precision == "fp16" and not candidate.scheme_row.loads_divided,
        "idle_tower": candidate.trains_idle_tower and not whole,
        "named_twice": candidate.quantization_row.words if candidate.names_weights_twice else "",
        "text_targets": ",".join(text_targets(candidate.model)) if candidate.tuning == "lora" else "",
    }


def about_sharding(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note that tokens are counted as spread evenly over divided experts."""
    if best.candidate.ep_size > 1:
        yield Note("experts_taken_even", {"ep_size": best.candidate.ep_size})


def about_experts(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note how adapters beside divided experts are saved, and that bitsandbytes leaves experts in 16 bits.

    Source: transformers 5.23, integrations/bitsandbytes.py, `replace_with_bnb_linear` (`nn.Linear`, not parameters).
    """
    candidate, size = best.candidate, DTYPE_BYTES[best.candidate.dtype]
    if candidate.script_saves_adapters_alone:
        yield Note("adapters_saved_alone", {"whole_bytes": candidate.model.params * size})
    left = candidate.quantization_row.bitsandbytes and not candidate.quantization_row.keeps_experts
    if left and candidate.model.expert_params:
        yield Note("experts_in_16_bits", {"weights_bytes": candidate.model.expert_params * size})


def about_deepspeed_alone(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note why one process uses DeepSpeed though nothing is sharded or offloaded."""
    candidate = best.candidate
    found = {"sharding": candidate.sharding, "offload_optimizer": candidate.offload_optimizer}
    if (
        candidate.num_processes == 1
        and found in ONE_PROCESS
        and copies_logits(problem)
        and "sharding" not in problem.job.pinned
    ):
        yield Note("deepspeed_alone", {})


def about_host(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note a host memory that is given or read and of which little is left."""
    host = problem.cluster.host
    share = best.host_peak_bytes / host.total_bytes
    if best.host_tight and not host.whole:
        yield Note("host_memory_full", {"share": share, "host_bytes": host.total_bytes})


def about_network(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note the speed that is assumed between nodes."""
    cluster = problem.cluster
    if best.candidate.num_nodes > 1 and cluster.network_bytes_per_second == USUAL_NETWORK_BYTES_PER_SECOND:
        yield Note("network_assumed", {"bytes_per_second": cluster.network_bytes_per_second})


def about_cache(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note that `generate` has no KV cache."""
    if best.candidate.generates_without_cache:
        yield Note("generates_without_cache", {"method": best.candidate.method})


def about_attention(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note the packages of FlashAttention, the gradient that it lacks, and what sdpa allocates for scores."""
    candidate = best.candidate
    flash = candidate.attn_implementation in FLASH
    if flash and "attn_implementation" not in problem.job.pinned:
        yield Note("flash_attention_from_hub", {"attn_implementation": candidate.attn_implementation})
    if flash and any(layer.attention.sink_params for layer, _ in candidate.model.layer_kinds):
        yield Note("sinks_without_gradient")
    if candidate.attn_implementation != "sdpa":
        return
    yield from about_math_attention(best, problem)
    if not candidate.pads or worst_batch(candidate, problem.cluster) is not candidate:
        return
    peak = estimate(candidate, problem.cluster).gpus[0].peak
    if peak.components.get("attention_scores", 0) >= MIN_REPORTED_BYTES:
        yield Note("sdpa_builds_mask")


def about_math_attention(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note that sdpa has no fused kernel for batches without a mask, and the release of torch that has one."""
    candidate, release = best.candidate, SINCE_TORCH["efficient_grouped"]
    if not lacks_unmasked_kernel(candidate, problem.cluster.gpu):
        return
    newer = estimate_or_none(replace(candidate, torch_version=release), problem)
    if newer is None or saved_bytes(newer, best, problem) < MIN_REPORTED_BYTES:
        return
    padded = estimate_or_none(replace(candidate, padded=True), problem)
    less = padded is not None and saved_bytes(padded, best, problem) >= MIN_REPORTED_BYTES
    values = {
        "gpu": problem.cluster.gpu.name,
        "float32": problem.cluster.gpu.supports_flash_attention_2,
        "peak_bytes": max(gpu.peak_bytes for gpu in best.gpus),
        "padded_bytes": max(gpu.peak_bytes for gpu in padded.gpus) if padded and less else 0,
        "torch_version": release,
        "newer_bytes": max(gpu.peak_bytes for gpu in newer.gpus),
    }
    yield Note("math_attention", values)


def about_mixers(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note the packages of the kernels for Mamba and linear attention, which Transformers does not require."""
    packages = fast_kernels(best.candidate.model)
    if packages:
        model, packed = best.candidate.model.id, best.candidate.flattened
        yield Note("reference_kernels", {"model": model, "packages": packages, "packed": packed})


def about_liger(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note the packages of kernels, that TRL will drop a setting, and that a classifier needs a config."""
    if best.candidate.use_liger_kernel and "use_liger_kernel" not in problem.job.pinned:
        yield Note("liger_kernel_set")
    if best.candidate.use_liger_kernel and best.candidate.method_row.head == "score":
        yield Note("liger_needs_config")
    if best.candidate.use_kernels:
        yield Note("hub_kernels")


def about_reference(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Yield a note on the pass that computes the reference's log-probabilities: its share of an epoch's time."""
    candidate = best.candidate
    if not candidate.precompute_ref_log_probs or "precompute_ref_log_probs" in problem.job.pinned:
        return
    with_reference, without = (
        throughput(replace(candidate, precompute_ref_log_probs=value), problem.cluster, 0.0).step_seconds
        for value in (False, True)
    )
    share = with_reference / without - 1
    yield Note("reference_precomputed", {"share": share, "processes": candidate.num_processes})


def about_adapters(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note how TRL and PEFT prepare a model for adapters, often done wrong by hand, and what prevents sharding."""
    candidate = best.candidate
    if candidate.tuning != "lora":
        return
    stops = candidate.model.architecture.stops_all_linear
    if stops and "lora_target_modules" not in problem.job.pinned:
        yield Note("targets_left_out", {"module": stops})
    if (setting := whole_model_setting(candidate)) and problem.cluster.num_gpus > 1:
        yield Note("not_sharded", {"setting": setting})
    if candidate.tool != "trl":
        return
    yield Note(
        "model_prepared",
        {
            "quantization": candidate.quantization,
            "kbit_preparation": candidate.method_row.kbit_preparation,
            "float32_adapters": candidate.script_casts_to_float32,
            "gradient_checkpointing": candidate.gradient_checkpointing,
            "use_reentrant": candidate.scheme_row.reentrant_with_adapters,
        },
    )
    if candidate.script_casts_to_float32:
        yield Note("adapters_cast_back")
    if candidate.quantization_row.bitsandbytes:
        yield Note("model_untouched")


def about_vllm(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note what vLLM does not get of adapters on a 4-bit base, and that TRL or QLoRA want another release of it."""
    candidate = best.candidate
    if candidate.engine_keeps_base:
        yield Note("engine_keeps_base")
    if candidate.tool == "trl" and candidate.engine_needs_bitsandbytes and candidate.vllm_version == "newest":
        first, last = SINCE_VLLM["no_bitsandbytes"], candidate.vllm_release
        yield Note("vllm_without_bitsandbytes", {"first": first, "last": last})
    if candidate.vllm != "off" and not candidate.vllm_taken:
        oldest, newest = taken_by_trl(release(candidate.trl_version))
        names = {"vllm": candidate.vllm_release, "trl": candidate.trl_version, "oldest": oldest, "newest": newest}
        yield Note("vllm_not_taken", names)


def about_lora_kernels(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note that Axolotl's fused kernels are counted as PEFT's layers where they, or the layers, have no formula."""
    candidate = best.candidate
    measured = any(layer.program == "measured" for layer, _ in candidate.model.layer_kinds)
    if candidate.lora_kernels and (measured or not candidate.counted_lora_kernels):
        yield Note("lora_kernels_as_peft")


def about_rank(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note that the LoRA rank is the largest of the job's ranks that fits."""
    ranks = problem.job.lora_ranks
    if ranks and best.candidate.tuning == "lora":
        yield Note("largest_rank", {"lora_r": best.candidate.lora_r, "ranks": tuple(sorted(ranks))})


def about_versions(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note that the method left TRL, came to it later than the job's release, or is experimental there."""
    row = best.candidate.method_row
    if row.first_trl == best.candidate.trl_version != problem.job.trl_version:
        yield Note("method_came_later", {"method": row.name, "trl": row.first_trl})
    if row.last_trl != "current" and release(best.candidate.trl_version) == release(row.last_trl):
        yield Note("method_left", {"method": row.name, "trl": row.last_trl})
    elif row.experimental:
        yield Note("method_experimental", {"trainer": row.trainer})
    if row.teacher_server and not best.candidate.teacher_server_gpus:
        teacher = best.candidate.teacher_server_model
        named = teacher is not None and teacher is not best.candidate.model
        yield Note("teacher_on_server", {"teacher": teacher.id if teacher is not None and named else "TEACHER"})


def about_values(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note how long a reference samples before the training (`Method.samples_values`)."""
    candidate = best.candidate
    if candidate.method_row.samples_values:
        sampled = replace(candidate, per_device_train_batch_size=candidate.rows * candidate.num_value_samples)
        batches = SHOWN_PROMPTS / (candidate.rows * candidate.num_processes)
        seconds = batches * generation_seconds(sampled, problem.cluster, policy_work(candidate), 0)
        yield Note("samples_values_first", {"num_value_samples": candidate.num_value_samples, "minutes": seconds / 60})


def about_context(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note rows that are longer than the context that the model was trained with."""
    candidate = best.candidate
    positions = candidate.model.max_position_embeddings
    if 0 < positions < candidate.row_tokens:
        values = {"row_tokens": candidate.row_tokens, "positions": positions, "model": candidate.model.id}
        yield Note("rows_beyond_context", values)


def about_data(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note the assumed prompt length, and the longest sequence of the vLLM engine."""
    candidate = best.candidate
    unbounded = candidate.method_row.generates and not candidate.method_row.cuts_prompts
    if unbounded and "prompt_length" not in problem.job.pinned:
        yield Note("prompt_length_assumed", {"prompt_length": candidate.prompt_length})
    if candidate.vllm != "colocate" or not is_shown(candidate, "vllm_max_model_length"):
        return
    length, positions = candidate.vllm_max_model_length, candidate.model.max_position_embeddings
    if length == 0:
        yield Note("engine_takes_context", {"positions": positions})
    elif "vllm_max_model_length" not in problem.job.pinned:
        yield Note("engine_length_set", {"vllm_max_model_length": length, "positions": positions})


def about_steps(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note that the longest rows are looked for in steps."""
    if problem.job.optimize == "max-length":
        yield Note("lengths_in_steps", {"step": LENGTH_STEP})


def about_stops(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note the settings that a stop rules out: expandable segments beside an engine, prefetching under ZeRO-3."""
    segments = replace(best.candidate, expandable_segments=True)
    if "expandable_segments" not in problem.job.pinned and CAPTURED_SEGMENTS.when(segments, problem.cluster):
        yield Note("segments_left_out", {"because": CAPTURED_SEGMENTS.reason(segments, problem.cluster)})
    ahead = replace(best.candidate, stage3_prefetch_bucket_size="auto")
    if best.candidate != ahead and HEAD_IN_FLIGHT.when(ahead, problem.cluster):
        yield Note("gathers_nothing_ahead", {"because": HEAD_IN_FLIGHT.reason(ahead, problem.cluster)})


def about_batch(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note an effective batch that differs from the one on all GPUs, because a vLLM server takes some of them."""
    candidate, on_all_gpus = best.candidate, effective_batch_size(problem.job, problem.cluster)
    share = candidate.per_device_train_batch_size * candidate.gradient_accumulation_steps
    if problem.job.optimize == "throughput" and candidate.effective_batch_size != on_all_gpus:
        yield Note(
            "effective_batch_changed",
            {
                "samples": candidate.effective_batch_size,
                "samples_per_process": share,
                "num_processes": candidate.num_processes,
                "gpus": problem.cluster.num_gpus,
                "samples_on_all": on_all_gpus,
            },
        )


def about_idle(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note GPUs that no engine can use: the tensor parallel size does not divide the GPUs of a node."""
    candidate = best.candidate
    idle = problem.cluster.num_gpus - candidate.num_processes - candidate.server_gpus
    if idle > 0 and candidate.vllm == "colocate" and "num_processes" not in problem.job.pinned:
        size = candidate.vllm_tensor_parallel_size
        values = {"idle": idle, "gpus": problem.cluster.num_gpus, "vllm_tensor_parallel_size": size}
        yield Note("gpus_idle", values)


def about_job(best: Estimate, problem: SearchProblem) -> Iterator[Note]:
    """Note settings that nothing reads, and the catalogue's remarks on the model, such as an uncertain source."""
    yield from unread_note(unread_settings(problem.job.pinned, problem.job.given, best.candidate))
    yield from (
        Note("model_source", {"model": problem.job.model.id, "remark": text}) for text in problem.job.model.notes
    )


NOTES: tuple[Callable[[Estimate, SearchProblem], Iterator[Note]], ...] = (
    lambda best, problem: iter(impractical(best) if best.fits else ()),
    about_dtype,
    about_precision,
    about_display,
    about_images,
    about_engine,
    about_unmerged_adapters,
    about_weight_sync,
    about_published_quantization,
    about_resuming,
    about_sharding,
    about_experts,
    about_deepspeed_alone,
    about_host,
    about_network,
    about_cache,
    about_attention,
    about_mixers,
    about_liger,
    about_reference,
    about_adapters,
    about_vllm,
    about_lora_kernels,
    about_rank,
    about_versions,
    about_values,
    about_context,
    about_data,
    about_rows,
    about_steps,
    about_stops,
    about_batch,
    about_idle,
    about_job,
)
