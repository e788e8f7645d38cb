"""The sentences of reasons, limits, notes and remedies: one row of `SENTENCES` for each code of a `Note`."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec.structs import fields

from planner.jobs.settings import settings_flags, settings_text
from planner.methods import KbitPreparation
from planner.planning import Proof
from planner.quantities import Note, NoteCode, Reason
from planner.quantizations import QUANTIZATIONS, Quantization
from planner.report import words
from planner.schemes import SCHEMES
from planner.search.explain import MIN_REPORTED_BYTES, MIN_REPORTED_SPEEDUP
from planner.search.knobs import TuningClass
from planner.units import MIB, format_count, format_gib, format_share, format_size

LEAST_SPARE_BYTES = 5 * MIB  # a smaller difference is the rounding of two figures in GiB
CLASS_LABELS: dict[TuningClass, str] = {"full": "full fine-tuning", "lora": "LoRA", "qlora": "QLoRA"}
DEVICE_WORDS = {
    "cuda": "on the GPU",
    "cpu": "on the CPU",
    "emulated": "on an emulated card",
}
# Source: transformers 5.23, modeling_flash_attention_utils.py, `FLASH_ATTN_KERNEL_FALLBACK`.
HUB_KERNELS = {
    "flash_attention_2": "kernels-community/flash-attn2",
    "flash_attention_3": "kernels-community/vllm-flash-attn3",
}
# Weights that a trainer casts to bfloat16, by its k-bit preparation.
CAST: dict[KbitPreparation, str] = {
    "none": "adapters", "embeddings_and_head": "embeddings and head", "everything_unquantized": "everything unquantized"
}  # fmt: skip
NOT_SET = "not set"
# First lines of the certificate of probes that ran on another device than a GPU.
FIRST_LINES = {
    "emulated": ("no GPU was measured: the probes ran the CUDA stack on emulated cards, which count memory only",),
    "cpu": ("no GPU was measured: the probes ran on the CPU, where the bytes of tensors are counted",),
}


def sentence(remark: Note | Reason) -> str:
    """Return a reason or a note as text: a line, or a part of one."""
    note = as_note(remark)
    return SENTENCES[note.code](**note.values)


def sentences(remarks: Iterable[Note | Reason]) -> tuple[str, ...]:
    """Return one line for each reason or note."""
    return tuple(map(sentence, remarks))


def as_note(remark: Note | Reason) -> Note:
    """Return a reason as a note; a note stays as it is."""
    if isinstance(remark, Note):
        return remark
    return Note("setting_chosen", {field.name: getattr(remark, field.name) for field in fields(Reason)})


def in_one_line(notes: Iterable[Note]) -> str:
    """Return the notes beside an alternative or a remedy: `max_length 8,192; 2 GPUs share each row`."""
    return "; ".join(sentences(notes))


def proof_lines(proof: Proof) -> tuple[str, ...]:
    """Return the certificate; without a GPU, a first line names the device."""
    return (*FIRST_LINES.get(proof.device, ()), *proof.lines)


# -- parts of sentences ------------------------------------------------------------------------------------------------


def _value(value: object) -> str:
    """Return a value as the libraries' files write it: `true` for True."""
    if value is None:
        return NOT_SET
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(str, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _phase(name: str) -> str:
    return name.replace("_", " ")


def _split(trainer: int, server: int, share: float, idle: float) -> str:
    """Return which of the two waits, the GPUs that train or the GPUs that sample."""
    waits = f"the trainer waits {format_share(share)}" if share >= idle else f"the server waits {format_share(idle)}"
    return f"on {trainer} + {server} GPUs {waits}"


def _other_split(other: Note | None) -> str:
    """Return the next best way to divide the GPUs, after a semicolon; empty if there is none."""
    return f"; {sentence(other)}" if other else ""


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}"


def _in_brackets(evidence: str) -> str:
    """Return the evidence of a figure, if it differs from that of the best candidate: ` (estimated)`."""
    return f" ({evidence})" if evidence else ""


def _expected(evidence: str, expected_bytes: int) -> str:
    return f"{evidence}: {format_gib(expected_bytes, 1)}"


# -- sentences that are more than one line of code ---------------------------------------------------------------------


def _setting_chosen(
    setting: str, value: object, other: object, saved_bytes: int, speed: float, fits_alone: bool, gathered_bytes: int
) -> str:
    """Example: "gradient_checkpointing true instead of false: saves 12.3 GiB, 0.78 times the speed"."""
    parts = []
    if abs(saved_bytes) >= MIN_REPORTED_BYTES:
        parts.append(f"{'saves' if saved_bytes > 0 else 'takes'} {format_gib(abs(saved_bytes), 1)}")
    if max(speed, 1 / speed) >= MIN_REPORTED_SPEEDUP:
        parts.append(f"{speed:.2f} times the speed")
    parts += ["and does not fit without"] if fits_alone else []
    gathers = (
        f"; gathering the whole model on every GPU takes {format_gib(gathered_bytes, 1)} there"
        if gathered_bytes
        else ""
    )
    return f"{setting} {_value(value)} instead of {_value(other)}: {', '.join(parts)}{gathers}"


# The condition under which a setting is read, by the setting or the property of the candidate that decides it.
NEEDED = {
    "eval_strategy": "an evaluation",
    "tuning": "adapters",
    "quantization": "weights that bitsandbytes quantizes",
    "gradient_checkpointing": "gradient checkpointing",
    "packing": "packing",
    "accumulates": "gradient accumulation",
    "sets_engine_length": "an engine that takes the length from the config",
}


def _needed(decided_by: str, values: tuple[str, ...]) -> str:
    """Return in words the condition under which a setting is read."""
    if decided_by == "vllm":
        ways = {"server": "a vLLM server", "colocate": "a vLLM engine in the training processes"}
        return ways[values[0]] if len(values) == 1 else "a vLLM engine"
    if decided_by == "sharding":
        words = [SCHEMES[name].words for name in values if name in SCHEMES]
        return " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
    return NEEDED[decided_by]


def _not_read(settings: Mapping[str, tuple[str, tuple[str, ...]]]) -> str:
    """Return the settings that nothing reads, with the conditions: `not used: use_dora (without adapters)`."""
    words = {name: _needed(*needs) for name, needs in settings.items()}
    groups = {needed: [name for name in words if words[name] == needed] for needed in words.values()}
    return "not used: " + "; ".join(f"{', '.join(names)} (without {needed})" for needed, names in groups.items())


def _cut(rows: float, tokens: float) -> str:
    return f"cuts {format_share(rows)} of the rows ({format_share(tokens)} of the tokens)" if rows else "cuts no row"


def _phase_peaks(phase: str, peak_bytes: int, most_bytes: int = 0) -> str:
    bound = f", up to {format_gib(most_bytes, 1)}" if most_bytes else ""
    return f"the {_phase(phase)} peaks at {format_gib(peak_bytes, 1)}{bound}"


def _checkpoint_not_resumed(only_model: bool, idle_tower: bool, text_targets: str) -> str:
    if only_model:
        return (
            "a run does not resume from its checkpoints: Transformers saves no optimizer states of a model that it "
            "shards itself (save_only_model)"
        )
    if idle_tower:
        way = f"adapters on the text's layers alone resume: --set lora_target_modules={text_targets}"
        return (
            "a run does not resume from its checkpoints under FSDP2: rows of text give the vision tower no optimizer "
            f"states, without which PyTorch stops; {way if text_targets else 'DeepSpeed resumes: --set sharding=zero3'}"
        )
    return (
        "a run of 4-bit weights under FSDP2 does not resume from its checkpoints: PyTorch does not find their scales "
        "(KeyError, absmax); adapters are saved, and 4-bit weights that are sharded resume: "
        "--set bnb_4bit_quant_storage=bfloat16, or --set sharding=ddp"
    )


def _images_not_counted(can_count: bool, needs_size: bool, in_prompts: bool) -> str:
    size = " --image-size 1024x768" if needs_size else ""
    prompt = " --prompt-length 1536" if in_prompts else ""
    flag = f": --images-per-row 1{size}{prompt}" if can_count else ""
    return f"rows of text are planned: images and the passes of the vision tower are not counted{flag}"


def _model_prepared(
    quantization: Quantization,
    kbit_preparation: KbitPreparation,
    float32_adapters: bool,
    gradient_checkpointing: bool,
    use_reentrant: bool,
) -> str:
    """Name the steps in which TRL and PEFT prepare a model for adapters."""
    steps = [f"load the model ({quantization})" if quantization != "none" else "load the model", "get_peft_model"]
    if QUANTIZATIONS[quantization].bitsandbytes:
        steps[1:1] = ["prepare_model_for_kbit_training"] if kbit_preparation != "none" else []
        steps.append(f"{CAST[kbit_preparation]} cast to bfloat16")
    steps += ["train.py casts them to float32"] if float32_adapters else []
    steps += ["enable_input_require_grads"] if gradient_checkpointing else []
    reentrant = "reentrant, which PEFT under ZeRO-3 needs" if use_reentrant else "non-reentrant"
    steps += [
        f"checkpointing at train(), {reentrant}"
        if gradient_checkpointing
        else f"train() (checkpointing off; were it on, {reentrant})"
    ]
    return f"TRL prepares the model itself, in this order: {', '.join(steps[:-1])}, {steps[-1]}"


# The first rank writes the log-probabilities to a file that the others open. For a dataset without files of its own its
# name is in a temporary folder of each process (datasets 5.2, arrow_dataset.py, `_get_cache_file_path`; trl 1.16,
# trainer/dpo_trainer.py, `_precompute_ref_logps`). Two processes with `Dataset.from_dict` stopped with
# FileNotFoundError; with `load_from_disk` they trained.
_IN_MEMORY = (
    ", and of several processes all but the first stop with FileNotFoundError for one in memory (Dataset.from_dict): "
    "save_to_disk and load_from_disk give it a file"
)


def _alternative_faster(alternative: Note, factor: float) -> str:
    flag = f" (--tuning {alternative.values['tuning']})" if alternative.code == "tuning_class" else ""
    return f"{sentence(alternative)} is {factor:.1f} times as fast{flag}"


def _dry_run(trl: str, needed_bytes: int, phase: str, expected_bytes: int) -> str:
    return (
        f"a dry run with the installed trl {trl} on an emulated GPU needed {format_gib(needed_bytes, 1)}, most in the "
        f"{_phase(phase)}; estimated: {format_gib(expected_bytes, 1)} ({expected_bytes / needed_bytes - 1:+.1%})"
    )


def _probe_peak(device: str, needed_bytes: int, phase: str, evidence: str, expected_bytes: int) -> str:
    tensors = " of tensors" if device == "cpu" else ""
    return (
        f"the probe {DEVICE_WORDS[device]} needed {format_size(needed_bytes)}{tensors}, its peak in the "
        f"{_phase(phase)}; {evidence}: {format_size(expected_bytes)} ({expected_bytes / needed_bytes - 1:+.1%})"
    )


def _memory_over_steps(
    steps: Sequence[int], reserved_bytes: Sequence[int], grown_bytes: int, host_grown_bytes: int
) -> str:
    pairs = zip(steps, reserved_bytes, strict=True)
    reserved = ", ".join(f"{format_gib(size, 2)} after step {step}" for step, size in pairs)
    return (
        f"PyTorch had reserved {reserved}; from step {steps[0]} to step {steps[-1]} tensors kept between steps grew by "
        f"{grown_bytes / MIB:+.0f} MiB, host memory of the process by {host_grown_bytes / MIB:+.0f} MiB"
    )


def _phase_measured(
    phase: str, needed_bytes: int, evidence: str, spare_bytes: int, expected_bytes: int, expected: str
) -> str:
    """The word "before" tells the evidence of the expected figure from equal evidence of the probes."""
    kept = f" and {format_size(spare_bytes)} cached" if spare_bytes >= LEAST_SPARE_BYTES else ""
    before = f"{expected} before" if expected == evidence else expected
    return (
        f"{_phase(phase)} {format_size(needed_bytes)} {evidence}{kept}; {format_size(expected_bytes)} {before} "
        f"({expected_bytes / needed_bytes - 1:+.1%})"
    )


def _attention_not_installed(device: str, attn_implementation: str, missing: str) -> str:
    where = "has no CPU kernels" if device == "cpu" else "is not installed here (pip install kernels)"
    return f"attn_implementation {attn_implementation}: {missing} {where}"


def _liger_not_installed(device: str) -> str:
    on_gpu = device in ("cuda", "emulated")
    where = "is not installed here (pip install liger-kernel)" if on_gpu else "runs on GPUs only"
    return f"use_liger_kernel false: liger-kernel {where}"


def _fewer_gpus(count: int, unit: str) -> str:
    return f"one of {count} {unit} is planned"


def _float16_overflows(model: str, bfloat16: bool, float32: bool) -> str:
    if bfloat16:
        way = "use --set bf16=true --set fp16=false"
    else:
        slower = ", or, slower, --set bf16=false --set fp16=false --set dtype=float32" if float32 else ""
        way = f"take a card with bfloat16{slower}"
    return f"{model} overflows float16, so that losses or gradients become nan: {way}"


def _whole_nodes(nodes: int, gpus_per_node: int, card: str, tuning: str = "") -> str:
    words = f"--tuning {tuning} on " if tuning else ""
    return f"{words}{f'{nodes} nodes of ' if nodes > 1 else ''}{gpus_per_node} x {card}"


# -- the table ---------------------------------------------------------------------------------------------------------

SENTENCES: dict[NoteCode, Callable[..., str]] = {
    "setting_chosen": _setting_chosen,
    # limits
    "length_is_longest": lambda setting, length, beyond: (
        f"{setting} {format_count(length)} is as long as this batch allows; beyond that {sentence(beyond)}"
    ),
    "length_up_to": lambda setting, length, beyond, evidence="": (
        f"{setting} up to {format_count(length)} at this batch{_in_brackets(evidence)}; beyond that {sentence(beyond)}"
    ),
    "length_up_to_model": lambda setting, length, evidence="": (
        f"{setting} up to {format_count(length)} at this batch{_in_brackets(evidence)}, "
        "which is as far as the model goes"
    ),
    "batch_fits_no_faster": lambda batch, evidence="": (
        f"per_device_train_batch_size {batch} fits too and is no faster{_in_brackets(evidence)}"
    ),
    "batch_not_estimated": lambda batch, because: (
        f"per_device_train_batch_size {batch} is not estimated: {sentence(because)}"
    ),
    "batch_does_not_fit": lambda batch, because, evidence="": (
        f"per_device_train_batch_size {batch} does not fit: {sentence(because)}{_in_brackets(evidence)}"
    ),
    "layers_not_measured": lambda: "this model's layers have no formulas, and are not measured with these settings",
    "engine_does_not_start": lambda: "the vLLM engine would not start",
    "host_memory_short": lambda needed_bytes: f"a node needs {format_gib(needed_bytes, 1)} of host memory",
    "phase_peaks": _phase_peaks,
    # memory and speed
    "float32_by_default": lambda more_bytes, dtype: (
        f"TRL loads in float32 unless dtype is set: that would need {format_gib(more_bytes, 1)} more; "
        f"the plan sets {dtype}"
    ),
    "rounds_small_updates": lambda: (
        "16-bit weights without a float32 copy round small updates away: float32 ones would not fit here"
    ),
    "no_bfloat16": lambda gpu: f"{gpu} has no bfloat16: the plan trains in fp16 (bf16 false, fp16 true)",
    "float16_overflows": _float16_overflows,
    "display_takes_memory": lambda total_bytes: (
        f"if this card also drives a display, that takes a part of the {format_gib(total_bytes, 1)}: give what "
        "nvidia-smi shows as free with --free-memory"
    ),
    "image_mask_dropped": lambda attn_implementation: (
        f"with {attn_implementation} the tokens of an image see only those before them; sdpa keeps their mask"
    ),
    "images_not_counted": _images_not_counted,
    "engine_spoils_images": lambda because: (
        f"no colocated vLLM: {because}; with a 16-bit base on several GPUs a server is right: --set vllm_mode=server"
    ),
    "base_takes_no_adapters": lambda because: (
        f"no vLLM: {because}; --tuning qlora of the model that was not quantized generates with vLLM"
    ),
    "sends_adapters_alone": lambda method, tokens_per_second, factor: (
        f"--method {method} sends only adapters to a vLLM server, without merging them: "
        f"about {words.tokens_per_second(tokens_per_second)}, {factor:.1f} times as fast"
    ),
    "server_not_quantized": lambda quantization: (
        f"the server samples from the published weights, the trainer trains on {QUANTIZATIONS[quantization].words} "
        "ones: their log-probabilities differ from the first step on, which the loss clips"
    ),
    "kernels_for_inference": lambda quantization: (
        f"Transformers loads {QUANTIZATIONS[quantization].words} layers with kernels that have no backward pass: plan "
        'export writes a train.py that loads them with backend "auto_trainable"'
    ),
    "checkpoint_not_resumed": _checkpoint_not_resumed,
    "resume_does_not_fit": lambda peak_bytes: (
        f"a run that resumes from a checkpoint needs {format_gib(peak_bytes, 1)} and may run out of memory, because "
        "PEFT loads adapters in float32: --set resume_from_checkpoint=true plans for it"
    ),
    "experts_taken_even": lambda ep_size: (
        f"tokens are assumed to spread evenly over the {ep_size} GPUs that divide the experts: a GPU whose experts are "
        "chosen more often needs more memory, and the others wait for it"
    ),
    "adapters_saved_alone": lambda whole_bytes: (
        f"to save adapters PEFT gathers the whole model on every process, {format_gib(whole_bytes, 1)} of host memory "
        "each: plan export writes a train.py that avoids this"
    ),
    "experts_in_16_bits": lambda weights_bytes: (
        f"bitsandbytes leaves the experts as they are, {format_gib(weights_bytes, 1)} in all: it quantizes linear "
        "modules, and Transformers 5 has experts as parameters; in 4 bits: axolotl's quantize_moe_experts, or a "
        "checkpoint in MXFP4 such as gpt-oss"
    ),
    "counted_as_fsdp_2": lambda: "FSDP 1, accelerate's default without fsdp_version, is counted as FSDP 2",
    "deepspeed_alone": lambda: (
        "DeepSpeed on one GPU shards nothing, but avoids float32 copies of logits; without it: --set sharding=none"
    ),
    "network_assumed": lambda bytes_per_second: (
        f"the network of each node is taken as {8 * bytes_per_second / 1e9:g} Gb/s: give yours with --network"
    ),
    "generates_without_cache": lambda method: (
        f"{method} generates without a KV cache, since TRL turns it off under gradient "
        "checkpointing: every token takes a forward pass over the whole row"
    ),
    "step_too_long": lambda samples, step_seconds: (
        f"impractical: an optimizer step of {format_count(samples)} samples takes {step_seconds / 60:,.0f} minutes"
    ),
    "generates_large_model": lambda model, share: (
        f"impractical: {model} generates with Transformers, without an engine, {share:.0%} of each step"
    ),
    "reference_kernels": lambda model, packages, packed: (
        f"install {' and '.join(packages)} too: "
        + (
            f"without them Transformers stops at packed rows of {model}; memory is planned for its layers in reference "
            "PyTorch, not for those kernels. Their builds need the torch that is installed: pip install "
            f"--no-build-isolation {' '.join(packages)}"
            if packed
            else f"without them Transformers runs layers of {model} in reference PyTorch, much slower, which is what "
            "memory is planned for, and stops at packed rows"
        )
    ),
    "segments_left_out": lambda because: f"launch without expandable_segments: {because}",
    "gathers_nothing_ahead": lambda because: f"stage3_prefetch_bucket_size 0: {because}",
    "flash_attention_from_hub": lambda attn_implementation: (
        f"attn_implementation {attn_implementation} needs no build: without the flash-attn package, transformers "
        f"takes {HUB_KERNELS[attn_implementation]} through the kernels package"
    ),
    "sinks_without_gradient": lambda: (
        "the backward pass of that kernel had no gradient of attention sinks in 2025 (nvidia-cosmos/cosmos-rl#219; "
        "huggingface/gpt-oss-recipes trains with it): compare your first steps with attn_implementation eager"
    ),
    "sdpa_builds_mask": lambda: (
        "batches with padding make sdpa build a mask of rows x length squared in every layer; "
        "--no-padded if yours have none"
    ),
    "math_attention": lambda gpu, float32, peak_bytes, padded_bytes, torch_version, newer_bytes: (
        "batches without padding, such as rows that are all cut at max_length, have no mask, and sdpa has no fused "
        f"kernel for them on {gpu}{' in float32' if float32 else ''}, because several heads share keys: it keeps the "
        f"scores of every head, {format_gib(peak_bytes, 1)} at the peak"
        f"{f', {format_gib(padded_bytes, 1)} if all batches hold padding (--padded)' if padded_bytes else ''}; with "
        f"torch {torch_version}, which has a kernel, {format_gib(newer_bytes, 1)} (--set torch_version={torch_version})"
    ),
    "liger_kernel_set": lambda: (
        "use_liger_kernel gives the same results with other rounding and needs the package liger-kernel; TRL 1.16 "
        "warns that TRL 2.0 will drop it. Its successor, use_kernels, replaces the norms only, and needs more memory"
    ),
    "hub_kernels": lambda: (
        "use_kernels needs the package kernels and downloads Liger's RMSNorm from the Hub when the model is loaded; "
        "without a connection Transformers keeps its own, which needs more memory"
    ),
    "reference_precomputed": lambda share, processes: (
        "precompute_ref_log_probs: the reference reads the dataset once before the first step, which takes "
        f"{share:.0%} of the time of an epoch and is not in the seconds of a step; TRL refuses it for a streamed "
        f"dataset{_IN_MEMORY if processes > 1 else ''}"
    ),
    "liger_needs_config": lambda: (
        "use_liger_kernel needs liger_kernel_config {fused_linear_cross_entropy: false} here: without it Liger "
        "replaces the forward pass of the reward model, which stops for want of an lm_head"
    ),
    "model_prepared": _model_prepared,
    "adapters_cast_back": lambda: (
        "fp16's GradScaler stops at 16-bit gradients, such as those of adapters that TRL casts to bfloat16 or of a "
        "copied score head: plan export writes a train.py that casts them to float32; in a script of your own, set "
        "parameter.data = parameter.data.float() for each trained parameter before train()"
    ),
    "not_sharded": lambda setting: (
        f"the model is whole on each GPU: {setting} is not planned with ZeRO or FSDP, which would divide it"
    ),
    "targets_left_out": lambda module: (
        f"adapters are on all linear layers but {module}, which lora_target_modules all-linear includes and at which "
        "PEFT stops"
    ),
    "model_untouched": lambda: (
        "so pass peft_config and an untouched model; one wrapped by hand needs enable_input_require_grads "
        "before checkpointing, or no gradient arrives"
    ),
    "vllm_without_bitsandbytes": lambda first, last: (
        f"vLLM {first} dropped bitsandbytes, which TRL asks it for with QLoRA: install vllm=={last}.*"
    ),
    "vllm_not_taken": lambda vllm, trl, oldest, newest: (
        f"trl {trl} takes vLLM {oldest} to {newest} and warns of {vllm}: pip installs it beside trl alone, not with "
        "trl[vllm]"
    ),
    "largest_rank": lambda lora_r, ranks: f"lora_r {lora_r} is the largest of {', '.join(map(str, ranks))} that fits",
    "method_came_later": lambda method, trl: f"{method} came to TRL with {trl}: the plan is for trl {trl}",
    "method_left": lambda method, trl: (
        f"{method} left TRL after {trl}: the plan is for trl {trl}; install trl<={trl}.*"
    ),
    "method_experimental": lambda trainer: f"{trainer} is in trl.experimental: it may change without notice",
    "rows_beyond_context": lambda row_tokens, positions, model: (
        f"rows of {format_count(row_tokens)} tokens are longer than the {format_count(positions)} "
        f"positions of {model} (max_position_embeddings), which it was trained with"
    ),
    "prompt_length_assumed": lambda prompt_length: (
        f"prompts are taken to be up to {format_count(prompt_length)} tokens; "
        "TRL does not cut them: give --prompt-length for yours"
    ),
    "engine_takes_context": lambda positions: (
        f"vLLM takes the model's whole context of {format_count(positions)} tokens: vllm_max_model_length is not set"
    ),
    "engine_length_set": lambda vllm_max_model_length, positions: (
        f"vllm_max_model_length {format_count(vllm_max_model_length)} is prompt and completion; "
        f"TRL's default is the model's whole context, {format_count(positions)}"
    ),
    "engine_share_small": lambda vllm_gpu_memory_utilization, weights, kv_cache, sequences, sampled: (
        f"vllm_gpu_memory_utilization {vllm_gpu_memory_utilization:g} is enough for the engine's {format_gib(weights)} "
        f"of weights and {format_gib(kv_cache)} of KV cache, {format_count(sequences)} sequences at once of "
        f"{format_count(sampled)} that are sampled"
    ),
    "server_takes_turns": lambda trainer, server, share, idle, other=None: (
        f"trainer and server take turns: the trainer ({_counted(trainer, 'GPU')}) waits for completions in "
        f"{format_share(share)} of a step, the server ({_counted(server, 'GPU')}) is idle in the rest"
        f"{_other_split(other)}"
    ),
    "server_samples_meanwhile": lambda trainer, server, share, idle, other=None: (
        f"trainer and server run at the same time: {_split(trainer, server, share, idle)}{_other_split(other)}"
    ),
    "other_split": lambda trainer, server, share, idle, speed: (
        f"{_split(trainer, server, share, idle)}, {speed:.2f} times as fast"
    ),
    "effective_batch_changed": lambda samples, samples_per_process, num_processes, gpus, samples_on_all: (
        f"an optimizer step sees {format_count(samples)} samples, {samples_per_process} for each of "
        f"{num_processes} processes; on all {gpus} GPUs it would be "
        f"{format_count(samples_on_all)}: say --effective-batch-size to keep one"
    ),
    "gpus_idle": lambda idle, gpus, vllm_tensor_parallel_size: (
        f"{idle} of {gpus} GPUs are idle: engines of {vllm_tensor_parallel_size} on the others are faster"
    ),
    "model_source": lambda model, remark: f"{model}: {remark}",
    # a plan
    "fewer_gpus_faster": lambda count, unit: f"{_fewer_gpus(count, unit)}: all of them are slower",
    "fewer_gpus_fit": lambda count, unit: f"{_fewer_gpus(count, unit)}: only there it fits",
    "safer_is_impractical": lambda because: (
        f"tight, and chosen because a candidate with more room is {sentence(because)}"
    ),
    "alternative_faster": _alternative_faster,
    "rows_shared": lambda gpus, samples: (
        f"{gpus} GPUs share each row, which none can hold alone: {samples} samples a step"
    ),
    "class_not_planned": lambda tuning, reason: f"{CLASS_LABELS[tuning]} is not planned: {reason}",
    # alternatives and what they take
    "tuning_class": lambda tuning: CLASS_LABELS[tuning],
    "tuning_class_offloading": lambda tuning: f"{CLASS_LABELS[tuning]} with offloading",
    "tuning_class_sharded": lambda tuning: f"{CLASS_LABELS[tuning]} sharded",
    "with_offloading": lambda: "with offloading",
    "on_one_gpu": lambda: "on one GPU",
    "with_16_bit_weights": lambda: "with 16-bit weights, which round small updates away",
    "with_eager_attention": lambda: "with eager attention, which needs less memory here",
    "micro_batch": lambda per_device_train_batch_size: f"per_device_train_batch_size {per_device_train_batch_size}",
    "lengths_in_steps": lambda step: f"lengths are tried in steps of {step} tokens",
    "with_shared_rows": lambda: "with shared rows",
    "without_pins": lambda: "without the settings you gave",
    "host_memory_needed": lambda needed_bytes: f"{format_gib(needed_bytes, 0)} of host memory a node",
    "host_memory_tight": lambda share, host_bytes: (
        f"{share:.0%} of an assumed host memory of {format_gib(host_bytes, 0)} would be used: "
        "give what a node has with --host-memory"
    ),
    "host_memory_full": lambda share, host_bytes: (
        f"{share:.0%} of the {format_gib(host_bytes, 0)} of host memory would be used, and the system and the file "
        "cache need a part of it: a run with 1 % free was killed (hiyouga/LLaMA-Factory#4629)"
    ),
    "row_length": lambda setting, length: f"{setting} {format_count(length)}",
    "gpus_share_rows": lambda gpus: f"{gpus} GPUs share each row",
    "pins_instead": lambda settings: f"leave out {', '.join(settings)}, or --free them where a config sets them",
    # remedies and what they take
    "setting_not_pinned": lambda settings: f"without {settings_text(settings)}",
    "with_option": lambda option, value: f"{option} {value}",
    "full_with_settings": lambda settings: f"--tuning full {settings_flags(settings)}",
    "price_of_8_bit_states": lambda: (
        "8-bit optimizer states instead of 32-bit ones; the authors' runs learn as well (arXiv 2110.02861); package "
        "bitsandbytes"
    ),
    "price_of_precomputing": lambda epochs: (
        "the same results; the nodes must share the folder of the dataset, and one pass over it before the training "
        f"is counted here for {epochs} epochs"
    ),
    "price_of_16_bit_adapters": lambda: (
        "adapters learn in bfloat16, which rounds small updates away; an argument of PEFT's get_peft_model, which "
        "TRL's own scripts do not pass"
    ),
    "price_of_attention_adapters": lambda: "the experts have no adapters and learn nothing",
    "price_of_divided_experts": lambda: (
        "a run does not resume from its checkpoints, experts have no adapters, and the GPUs wait for the one whose "
        "experts are chosen most"
    ),
    "price_of_16_bit_copy": lambda: (
        "it needs a copy of the checkpoint in 16 bits, since distributed_config cannot load a quantized one; "
        "a run does not resume from its checkpoints, and experts have no adapters"
    ),
    "price_of_grouped_lengths": lambda: "a batch has rows of similar lengths, which is another order of learning",
    "price_of_longer_rollouts": lambda: "the second step learns from completions of the policy before the first one",
    "with_settings": settings_flags,
    "more_gpus": lambda gpus: f"{gpus} GPUs",
    "larger_cards": lambda gpus, card: f"{gpus} x {card}",
    "whole_nodes": _whole_nodes,
    "states_in_8_bit": lambda: "8-bit states, paged to the host under pressure",
    "length_asked": lambda length: f"{format_count(length)} tokens asked for",
    # dry runs
    "no_dry_run": lambda reason: f"no dry run: {reason}",
    "dry_run": _dry_run,
    "dry_run_ran_out": lambda trl, needed_bytes, phase, expected_bytes: (
        f"a dry run with the installed trl {trl} ran out of memory on an emulated GPU in the {_phase(phase)}: it needs "
        f"{format_gib(needed_bytes, 1)} at least; estimated: {format_gib(expected_bytes, 1)}"
    ),
    "searched_again": lambda residual: (
        f"searched again with {residual:.1%} more memory for this tuning class, "
        "which the dry run needed above the estimate"
    ),
    # probes
    "cpu_counts_tensors": lambda unmeasured_bytes, evidence: (
        "the probe ran on the CPU, where tensors' bytes are counted: "
        f"what CUDA takes besides ({format_gib(unmeasured_bytes, 1)}) and the speed are still {evidence}"
    ),
    "ran_out_of_memory": lambda device, phase, over_bytes: (
        f"it ran out of memory {DEVICE_WORDS[device]} in the {_phase(phase)}, {format_gib(over_bytes, 2)} short at "
        "least; phases that it did not reach are not listed"
    ),
    "server_not_measured": lambda evidence: f"the vLLM server's cards are still {evidence}",
    "larger_card_probed": lambda: "the probe had a larger card: what its allocator cached there is left out",
    "probe_ran_out_of_memory": lambda device, phase, evidence, expected_bytes: (
        f"the candidate ran out of memory {DEVICE_WORDS[device]} in the {_phase(phase)} "
        f"({evidence}: it fits in {format_size(expected_bytes)})"
    ),
    "probe_fits": lambda device: f"the candidate fits {DEVICE_WORDS[device]}, which the plan had denied",
    "probe_needs_more": lambda device, needed_bytes, most_bytes, evidence: (
        f"the candidate needs {format_size(needed_bytes)} {DEVICE_WORDS[device]}, more than the "
        f"{format_size(most_bytes)} that were {evidence} at most"
    ),
    "proven_instead": lambda settings: f"proven instead of what was recommended: {settings_text(settings)}",
    "probe_peak": _probe_peak,
    "memory_over_steps": _memory_over_steps,
    "probe_has_no_phase": lambda device: f"the probe {DEVICE_WORDS[device]} has no phase that was expected",
    "phase_measured": _phase_measured,
    "attention_not_installed": _attention_not_installed,
    "liger_not_installed": _liger_not_installed,
    # the user's own results
    "own_probe_ran_out_of_memory": lambda gpu, phase, evidence, expected_bytes: (
        f"your own probe of this candidate on {gpu} ran out of memory in the {_phase(phase)} "
        f"({_expected(evidence, expected_bytes)}): "
        "take a smaller batch or length, or let plan --probe find the largest that fits"
    ),
    "own_probes": lambda probes, gpu, needed_bytes, evidence, expected_bytes: (
        f"measured by {_counted(probes, 'probe')} of your own on {gpu}: "
        f"{format_gib(needed_bytes, 1)} needed at most ({_expected(evidence, expected_bytes)})"
    ),
    "own_runs": lambda runs, gpu, needed_bytes, evidence, expected_bytes: (
        f"{_counted(runs, 'run')} of your own on {gpu} needed {format_gib(needed_bytes, 1)} "
        f"in the first steps, with your data ({_expected(evidence, expected_bytes)})"
    ),
    "own_context": lambda gpu, measured_bytes, measurements, estimated_bytes: (
        f"CUDA took {format_gib(measured_bytes, 2)} beside PyTorch on your {gpu} "
        f"(median of {_counted(measurements, 'measurement')}); {format_gib(estimated_bytes, 2)} are estimated"
    ),
    "own_lines_unread": lambda lines, path: (
        f"{_counted(lines, 'line')} of {path} cannot be read; `plan measurements` lists them"
    ),
    "own_storage_not_read": lambda: (
        "$PLAN_STORAGE is not read: it needs the extra storage (pip install 'finetune-plan[storage]')"
    ),
    # settings of the job and its config files
    "keys_not_counted": lambda keys: f"the config sets what the plan does not count: {', '.join(keys)}",
    "keys_not_used": lambda keys: f"not used by the plan: {', '.join(keys)}",
    "settings_not_read": _not_read,
    "read_as_tool": lambda tool, release: f"the config is read as {tool}'s: planned as {tool} {release} runs it",
    "lora_kernels_as_peft": lambda: (
        "Axolotl's fused kernels of LoRA are counted as PEFT's own layers, which need more memory"
    ),
    "keys_without_effect": lambda keys: f"no effect on memory or speed: {', '.join(keys)}",
    "method_lacks_settings": lambda method, settings: (
        f"{method} has no {', '.join(settings)}: TRL stops at a config that sets it"
    ),
    "checkpointing_details_dropped": lambda method, settings: (
        f"{', '.join(settings)}: after the first pass without gradients TRL checkpoints every layer of {method} and "
        "offloads nothing; the plan counts this"
    ),
    "length_not_used": lambda setting, method, limits: (
        f"{setting} is not used: the rows of {method} are {' and '.join(limits)}"
    ),
    "machines_of_file_overridden": lambda machines, nodes, gpus: (
        f"num_machines {machines} of the accelerate file gives way to --gpus: launch with --num_machines {nodes} "
        f"--num_processes {gpus}"
    ),
    "oldest_trl_taken": lambda trl, oldest: (
        f"trl {trl} is planned as {oldest}, the oldest whose code paths are modelled"
    ),
    "keys_of_older_releases": lambda keys, trl: (
        f"planned as trl {trl} ran it: newer releases do not have {', '.join(keys)}"
    ),
    "rows_not_cut": lambda taken: (
        f"max_length is null, so TRL cuts no row and the longest is not known: {taken:,} tokens are planned. "
        "Give your longest row with --max-length"
    ),
    "config_change": lambda setting, after, before=None: f"config {setting}: {_value(before)} -> {_value(after)}",
    "config_unchanged": lambda: "the config needs no change",
    # the lengths of rows
    "rows_taken_full": lambda max_length: (
        f"rows are taken as {format_count(max_length)} tokens long: give yours with --lengths"
    ),
    "rows_cut": lambda max_length, rows, tokens, dropped: (
        f"max_length {format_count(max_length)} {'leaves out' if dropped else 'cuts'} {format_share(rows)} of the rows "
        f"({format_share(tokens)} of the tokens)"
    ),
    "completions_taken_full": lambda: "completions are taken as full-length: give yours with --completion-lengths",
    "completions_cut": lambda max_completion_length, completions, tokens: (
        f"max_completion_length {format_count(max_completion_length)} cuts {format_share(completions)} of the "
        f"completions ({format_share(tokens)} of the tokens)"
    ),
    "rows_packed": lambda packed_rows, rows: (
        f"a step of {format_count(packed_rows)} packed rows trains on about {format_count(rows)} rows of the dataset, "
        "so another learning rate may be better; packed rows do not attend to each other"
    ),
    "length_costs": lambda max_length, rows, tokens, speed=0.0: (
        f"max_length {format_count(max_length)} {_cut(rows, tokens)}"
        + (f": an epoch is {speed:.2g} times as fast" if speed else " and does not fit")
    ),
}
