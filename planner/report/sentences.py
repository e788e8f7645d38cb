"""The sentences of reasons, limits, notes and remedies, one for each code of a `Note`.

data/sentences.txt has those that need no more than their values; a field `{free_bytes:gib1}` is a value and a key of
`FORMATS`, or a format of Python. The others are functions, in `SENTENCES`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from shlex import quote
from string import Formatter
from typing import Any

from msgspec.structs import fields

from planner.files.texts import text_parts
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
    if note.code in SENTENCES:
        return SENTENCES[note.code](**note.values)
    return Filled().vformat(templates()[note.code], (), note.values)


@lru_cache
def templates() -> Mapping[str, str]:
    """Return the sentences with fields for their values, by code."""
    return {code: " ".join(text.splitlines()) for code, text in text_parts("sentences").items()}


class Filled(Formatter):
    """A sentence with its values."""

    def format_field(self, value: Any, format_spec: str) -> str:
        """Return a value as `FORMATS` or Python formats it; of a `counted` one the word follows: `3 probes`."""
        if format_spec.startswith("counted "):
            return _counted(value, format_spec.removeprefix("counted "))
        return FORMATS[format_spec](value) if format_spec in FORMATS else format(value, format_spec)


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
    return NEEDED.get(decided_by, decided_by)  # a switch that a config file leaves off: use_peft


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


def _checkpoint_not_resumed(
    second_adapter: bool, only_model: bool, scaled: bool, idle_tower: bool, named_twice: str, text_targets: str
) -> str:
    if second_adapter:
        return (
            "a run does not resume from its checkpoints: the trainer adds its second adapter to a model that has "
            "loaded it already"
        )
    if only_model:
        return (
            "a run does not resume from its checkpoints: Transformers saves no optimizer states of a model that it "
            "shards itself (save_only_model)"
        )
    if scaled:
        return (
            "a run in float16 under FSDP2 does not resume from its checkpoints: PyTorch makes the optimizer's states "
            "by a step, at which the gradient scaler stops before a loss was scaled (AssertionError, _scale is None); "
            "the weights are saved, and DeepSpeed resumes: --set zero_stage=2"
        )
    if idle_tower:
        targets = quote(f"lora_target_modules={text_targets}")
        way = f"adapters on the text's layers alone resume: --set {targets}"
        return (
            "a run does not resume from its checkpoints under FSDP2: rows of text give the vision tower no optimizer "
            f"states, without which PyTorch stops; {way if text_targets else 'DeepSpeed resumes: --set sharding=zero3'}"
        )
    if named_twice:
        return (
            f"a run of {named_twice} weights under FSDP2 does not resume from its checkpoints: PEFT has them under two "
            "names, of which PyTorch does not find one (KeyError, quant_linear_module); adapters are saved, and DDP "
            "resumes: --set sharding=ddp"
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


# -- the tables --------------------------------------------------------------------------------------------------------

FORMATS: dict[str, Callable[[Any], str]] = {
    "count": format_count,
    "size": format_size,
    "share": format_share,
    "gib": format_gib,
    **{f"gib{digits}": partial(format_gib, digits=digits) for digits in range(3)},
    "phase": _phase,
    "note": sentence,
    "settings": settings_text,
    "flags": settings_flags,
    "value": _value,
    "names": ", ".join,
    "rate": words.tokens_per_second,
    "device": DEVICE_WORDS.__getitem__,
    "class": lambda tuning: CLASS_LABELS[tuning],
    "quantization": lambda name: QUANTIZATIONS[name].words,
}

SENTENCES: dict[NoteCode, Callable[..., str]] = {
    "setting_chosen": _setting_chosen,
    # limits
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
    "batch_does_not_fit": lambda batch, because, evidence="": (
        f"per_device_train_batch_size {batch} does not fit: {sentence(because)}{_in_brackets(evidence)}"
    ),
    "phase_peaks": _phase_peaks,
    # memory and speed
    "float16_overflows": _float16_overflows,
    "images_not_counted": _images_not_counted,
    "checkpoint_not_resumed": _checkpoint_not_resumed,
    "network_assumed": lambda bytes_per_second: (
        f"the network of each node is taken as {8 * bytes_per_second / 1e9:g} Gb/s: give yours with --network"
    ),
    "step_too_long": lambda samples, step_seconds: (
        f"impractical: an optimizer step of {format_count(samples)} samples takes {step_seconds / 60:,.0f} minutes"
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
    "flash_attention_from_hub": lambda attn_implementation: (
        f"attn_implementation {attn_implementation} needs no build: without the flash-attn package, transformers "
        f"takes {HUB_KERNELS[attn_implementation]} through the kernels package"
    ),
    "math_attention": lambda gpu, float32, peak_bytes, padded_bytes, torch_version, newer_bytes: (
        "batches without padding, such as rows that are all cut at max_length, have no mask, and sdpa has no fused "
        f"kernel for them on {gpu}{' in float32' if float32 else ''}, because several heads share keys: it keeps the "
        f"scores of every head, {format_gib(peak_bytes, 1)} at the peak"
        f"{f', {format_gib(padded_bytes, 1)} if all batches hold padding (--padded)' if padded_bytes else ''}; with "
        f"torch {torch_version}, which has a kernel, {format_gib(newer_bytes, 1)} (--set torch_version={torch_version})"
    ),
    "reference_precomputed": lambda share, processes: (
        "precompute_ref_log_probs: the reference reads the dataset once before the first step, which takes "
        f"{share:.0%} of the time of an epoch and is not in the seconds of a step; TRL refuses it for a streamed "
        f"dataset{_IN_MEMORY if processes > 1 else ''}"
    ),
    "model_prepared": _model_prepared,
    "largest_rank": lambda lora_r, ranks: f"lora_r {lora_r} is the largest of {', '.join(map(str, ranks))} that fits",
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
    # a plan
    "fewer_gpus_faster": lambda count, unit: f"{_fewer_gpus(count, unit)}: all of them are slower",
    "fewer_gpus_fit": lambda count, unit: f"{_fewer_gpus(count, unit)}: only there it fits",
    "alternative_faster": _alternative_faster,
    # alternatives and what they take
    "tuning_class": lambda tuning: CLASS_LABELS[tuning],
    # remedies and what they take
    "with_settings": settings_flags,
    "whole_nodes": _whole_nodes,
    # dry runs
    "dry_run": _dry_run,
    # probes
    "probe_peak": _probe_peak,
    "memory_over_steps": _memory_over_steps,
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
    # settings of the job and its config files
    "settings_not_read": _not_read,
    "length_not_used": lambda setting, method, limits: (
        f"{setting} is not used: the rows of {method} are {' and '.join(limits)}"
    ),
    "config_change": lambda setting, after, before=None: f"config {setting}: {_value(before)} -> {_value(after)}",
    # the lengths of rows
    "rows_cut": lambda max_length, rows, tokens, dropped: (
        f"max_length {format_count(max_length)} {'leaves out' if dropped else 'cuts'} {format_share(rows)} of the rows "
        f"({format_share(tokens)} of the tokens)"
    ),
    "length_costs": lambda max_length, rows, tokens, speed=0.0: (
        f"max_length {format_count(max_length)} {_cut(rows, tokens)}"
        + (f": an epoch is {speed:.2g} times as fast" if speed else " and does not fit")
    ),
}
