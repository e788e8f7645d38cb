"""The table a person reads: what to run, what fills each GPU in each phase, what else there is."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from rich.text import Text

from planner.candidate import Candidate
from planner.cluster import Cluster
from planner.plan import Alternative, Plan, Remedy
from planner.quantities import Component, Estimate, GpuMemory, PhaseMemory
from planner.report.proof import difference_lines, proof_lines
from planner.settings import SPELLINGS, settings_of
from planner.units import GIB, format_count, format_gib

# What a bar shows: neighbours that a reader thinks of together, with a glyph (pipes have no colour) and a colour.
GROUPS: tuple[tuple[str, str, str, tuple[Component, ...]], ...] = (
    ("weights", "█", "blue", ("weights", "autocast_copies")),
    ("states", "▓", "magenta", ("adapters", "gradients", "optimizer_states")),
    ("activations", "▒", "green", ("activations", "attention_scores", "transients")),
    ("loss", "▚", "yellow", ("loss",)),
    ("generation", "░", "cyan", ("engine", "kv_cache")),
    ("runtime", "·", "bright_black", ("communication", "fragmentation", "runtime", "unexplained")),
)
SECONDS_IN_WORDS = 600  # from here on in minutes
MIN_WIDTH, MAX_WIDTH = 80, 120  # columns; wider lines are hard to follow back
LABEL_WIDTH, PHASE_WIDTH, NUMBER_WIDTH = 13, 16, 8

PROFILED = ("torch", "trl")  # of the libraries that a profile or a probe comes from, those whose own code allocates
PROBED_WORDS = {"cuda": "", "cpu": " on the CPU", "simulated": " by probes of a simulated card"}

SHARDING_WORDS = {"none": "one GPU", "ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "fsdp2": "FSDP2"}
QUANTIZATION_WORDS = {"nf4": "4-bit nf4", "nf4-double": "double-quantized nf4", "int8": "int8", "gptq": "GPTQ", "awq": "AWQ", "fp8": "fp8", "mxfp4": "mxfp4"}

# The settings of a candidate, line by line; the names of the second part are shown whatever their value, the others where they differ from TRL's.
LINES: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("batch", ("per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"), ("steps_per_generation", "num_iterations")),
    ("lengths", ("max_length", "prompt_length", "max_completion_length", "max_new_tokens", "response_length"), ("packing", "padding_free", "padded")),
    ("model", ("dtype", "gradient_checkpointing", "attn_implementation"), ()),
    ("adapters", ("lora_r", "lora_target_modules", "lora_dropout"), ("use_peft", "autocast_adapter_dtype")),
    (
        "GPUs",
        ("num_processes",),
        ("num_machines", "zero_stage", "ds3_gather_for_generation", "fsdp_version", "offload_optimizer_device", "offload_param_device", "fsdp_offload_params"),
    ),
    ("vLLM", ("vllm_mode", "vllm_gpu_memory_utilization"), ()),
)
ALWAYS_SHOWN = frozenset(name for _, always, _ in LINES for name in always)
LINE_OF = {name: label for label, always, sometimes in LINES for name in (*always, *sometimes)}
SHOWN_ELSEWHERE = ("model_name_or_path", "method", "trl_version", "environment", "distributed_type", "use_vllm")

SMALLEST_BYTES = GIB // 20 + 1  # the least that prints as 0.1 GiB and not as 0.0
# Endings of the details that count something; the others are bytes.
COUNTS = ("tokens", "sequences")

# Fields whose choice brings settings of its own; the defaults of those settings are not worth a line.
STRUCTURE = ("tuning", "quantization", "precision", "sharding", "vllm")


def plan_table(plan: Plan, width: int, checked: str = "") -> Text:
    """The whole answer to a job. `checked`: what a dry run says of the estimate."""
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    lines = [
        *_header(plan.best, plan.cluster, width, checked),
        Text(),
        *_candidate_block("recommended" if plan.verdict == "fits" else "nearest", plan.best, width),
        Text(),
        *_bars(plan.best, width),
        Text(),
        *_proof(plan, width),
        *_listed("to fit", [_remedy(remedy, plan.best) for remedy in plan.remedies], width),
        *_listed("also", [_alternative(other, plan.best) for other in plan.alternatives], width),
        *_listed("more", plan.more, width),
        *_listed("why", plan.best.reasons, width),
        *_listed("note", plan.warnings, width),
    ]
    return _joined(lines)


def estimate_table(estimate: Estimate, cluster: Cluster, warnings: Sequence[str], width: int, checked: str = "") -> Text:
    """One candidate, without a search around it. `checked`: what a dry run says of the estimate."""
    width = min(max(width, MIN_WIDTH), MAX_WIDTH)
    lines = [
        *_header(estimate, cluster, width, checked),
        Text(),
        *_candidate_block("candidate", estimate, width),
        Text(),
        *_bars(estimate, width),
        Text(),
        *_listed("why", estimate.reasons, width),
        *_listed("note", warnings, width),
    ]
    return _joined(lines)


def refusal(plan: Plan) -> str:
    """Why nothing fits, in a line: by how much, where, and what would."""
    gpu = _tightest(plan.best)
    remedy = f" It fits with {plan.remedies[0].change}." if plan.remedies else ""
    return (
        f"No candidate fits {cards(plan.cluster)}. The nearest peaks at {format_gib(gpu.peak_bytes, 1)} in the {_phase_word(gpu.peak)}, "
        f"{format_gib(plan.best.over_bytes, 1)} too much at a risk of {plan.job.risk:g}.{remedy}"
    )


def shortfall(estimate: Estimate, risk: float) -> str:
    """Why one candidate does not fit, in a line."""
    gpu = _tightest(estimate)
    return (
        f"The candidate does not fit: it peaks at {format_gib(gpu.peak_bytes, 1)} of {format_gib(gpu.capacity_bytes, 1)} in the {_phase_word(gpu.peak)}, "
        f"{format_gib(estimate.over_bytes, 1)} too much at a risk of {risk:g}. Ask plan without estimate for what fits."
    )


def cards(cluster: Cluster) -> str:
    """The GPUs in words: `2 x A100-40G (39.5 GiB each)`."""
    gpu = cluster.gpu
    nodes = f"{cluster.nodes} nodes of " if cluster.nodes > 1 else ""
    each = " each" if cluster.num_gpus > 1 else ""
    return f"{nodes}{cluster.gpus_per_node} x {gpu.name} ({format_gib(gpu.free_bytes, 1)}{each})"


def describe(candidate: Candidate) -> str:
    """A candidate in a line of words: `LoRA r 16 on a bfloat16 base · DDP · vLLM colocated, asleep while training`."""
    return " · ".join(part for part in (_tuning_words(candidate), _sharding_words(candidate), _generation_words(candidate)) if part)


def _tuning_words(candidate: Candidate) -> str:
    autocast = {"bf16": " under bf16 autocast", "fp16": " under fp16 autocast", "no": ""}[candidate.precision] if candidate.dtype == "float32" else ""
    if candidate.tuning == "full":
        return f"full fine-tuning of {candidate.dtype} weights{autocast}"
    if candidate.quantization == "none":
        return f"LoRA r {candidate.lora_r} on a {candidate.dtype} base{autocast}"
    return f"QLoRA r {candidate.lora_r} on a {QUANTIZATION_WORDS[candidate.quantization]} base"


def _sharding_words(candidate: Candidate) -> str:
    moved = [words for words, there in (("optimizer", candidate.offload_optimizer), ("parameters", candidate.offload_param)) if there]
    return SHARDING_WORDS[candidate.sharding] + (f" with {' and '.join(moved)} on the host" if moved else "")


def _generation_words(candidate: Candidate) -> str:
    if not candidate.method_row.generates:
        return ""
    if candidate.vllm == "server":
        gpus = candidate.vllm_tensor_parallel_size * candidate.vllm_data_parallel_size
        return f"vLLM server on {gpus} GPU{'s' if gpus > 1 else ''} of its own"
    if candidate.vllm == "colocate":
        return "vLLM colocated" + (", asleep while training" if candidate.vllm_enable_sleep_mode else "")
    return "generates with Transformers"


def _proof(plan: Plan, width: int) -> Iterator[Text]:
    """What the probes said, and how far they and the answer before them are apart."""
    if plan.proof is None:
        return
    yield from _listed("proof", proof_lines(plan.proof), width)
    yield from _listed("seen", difference_lines(plan.proof), width)
    yield Text()


def _header(estimate: Estimate, cluster: Cluster, width: int, checked: str) -> Iterator[Text]:
    candidate = estimate.candidate
    job, hardware = f"{candidate.model.id} · {candidate.method}", f"{cards(cluster)} · trl {candidate.trl_version}"
    evidence = f"{rung(estimate)}{checked}"
    room = width - len(evidence) - 2
    first = f"{job} · {hardware}" if len(f"{job} · {hardware}") <= room else job
    yield Text.assemble((first, "bold"), " " * (room + 2 - len(first)), (evidence, "italic"))
    if first == job:
        yield Text(hardware, style="bold")


def rung(estimate: Estimate) -> str:
    """What an answer stands on: `simulated (profile of torch 2.13, trl 1.16)`."""
    stack = ", ".join(f"{name} {'.'.join(version.split('.')[:2])}" for name, version in estimate.versions if name in PROFILED)
    if estimate.device != "none":
        return f"{estimate.evidence}{PROBED_WORDS[estimate.device]}" + (f" ({stack})" if stack else "")
    return f"{estimate.evidence} (profile of {stack})" if stack else estimate.evidence


def _candidate_block(label: str, estimate: Estimate, width: int) -> Iterator[Text]:
    """What it is, whether it fits and how fast it is, then every setting that is not TRL's."""
    style = "green" if estimate.fits else "red"
    yield from _wrapped(label, [describe(estimate.candidate)], width, style="bold")
    yield from _wrapped("", [verdict(estimate)], width, style=style)
    yield from _wrapped("", [speed(estimate)], width, style=style)
    yield Text()
    for line, settings in shown_settings(estimate.candidate).items():
        yield from _wrapped(line, settings, width)
    for name, value in _environment(estimate.candidate):
        yield from _wrapped("launch with", [f"{name}={value}"], width)


def shown_settings(candidate: Candidate) -> dict[str, list[str]]:
    """The lines of settings, named as they can be pasted back."""
    settings = settings_of(candidate)
    plain = Candidate(model=candidate.model, method=candidate.method, trl_version=candidate.trl_version)
    usual = settings_of(plain) | {"steps_per_generation": candidate.gradient_accumulation_steps}  # trl 1.16, grpo_config.py:1098
    chosen = {name for field in STRUCTURE for name in SPELLINGS[field][getattr(candidate, field)]}
    implied = settings_of(replace(plain, **{field: getattr(candidate, field) for field in STRUCTURE}))
    lines: dict[str, list[str]] = {label: [] for label, _, _ in LINES}
    for name in (*(name for name in LINE_OF if name in settings), *(name for name in settings if name not in LINE_OF)):
        differs = settings[name] != usual.get(name) and (name in chosen or settings[name] != implied.get(name))
        if (name in ALWAYS_SHOWN or differs) and name not in SHOWN_ELSEWHERE:
            lines[LINE_OF.get(name, "vLLM" if name.startswith("vllm_") else "model")].append(f"{name} {_value(settings[name])}")
    lines["batch"].append(f"{format_count(candidate.effective_batch_size)} samples a step")
    return {label: items for label, items in lines.items() if items}


def _environment(candidate: Candidate) -> list[tuple[str, object]]:
    environment = settings_of(candidate)["environment"]
    return list(environment.items()) if isinstance(environment, dict) else []


def _value(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return "default" if value is None else str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {_value(inner)}" for name, inner in value.items()) + "}"
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def verdict(estimate: Estimate) -> str:
    """`fits with 99.9 % · peak 38.6 (38.1 to 39.2) of 39.5 GiB in the backward`, of the GPUs with the least room."""
    gpu = _tightest(estimate)
    low, high = gpu.interval_bytes
    peak = f"peak {_gib(gpu.peak_bytes)} ({_gib(low)} to {_gib(high)}) of {format_gib(gpu.capacity_bytes, 1)} in the {_phase_word(gpu.peak)}"
    if estimate.fits:
        sure = "fits, as a probe showed" if estimate.device == "cuda" else f"fits with {_percent(estimate.fit_probability)}"
        return f"{sure} · {peak}"
    return f"does not fit, up to {format_gib(estimate.over_bytes, 1)} over · {peak}"


def speed(estimate: Estimate) -> str:
    """`about 2,200 tokens/s, 7.5 s a step`."""
    throughput = estimate.throughput
    return f"about {tokens_per_second(throughput.tokens_per_second)}, {_about_seconds(throughput.step_seconds)} a step"


def _bars(estimate: Estimate, width: int) -> Iterator[Text]:
    """For each GPU role a row a phase: a bar of the card, the total in GiB, and for the peak what it is made of."""
    bar_width = width - LABEL_WIDTH - PHASE_WIDTH - NUMBER_WIDTH
    first = 0
    yield _legend(estimate)
    for gpu in estimate.gpus:
        labels = [_gpu_range(first, gpu.count), gpu.role, format_gib(gpu.capacity_bytes, 1)]
        first += gpu.count
        rows = list(gpu.phases)
        for row in range(max(len(rows), len(labels))):
            label = Text(f"{labels[row] if row < len(labels) else '':<{LABEL_WIDTH}}", style="bold" if row == 0 else "dim")
            yield label + _bar_row(rows[row], gpu, bar_width) if row < len(rows) else label
        yield from _wrapped("", [f"peak: the {_phase_word(gpu.peak)} = " + " + ".join(_parts(gpu.peak))], width, separator=" + ")
        for component, parts in gpu.details.items():
            if len(parts) > 1:
                yield from _wrapped("", [f"{_words(component)} {_sum(parts)} = {_detail(parts)}"], width)
        yield Text()
    yield from _wrapped("host", [f"{format_gib(estimate.host_peak_bytes, 1)} of memory on each node"], width)


def _bar_row(phase: PhaseMemory, gpu: GpuMemory, bar_width: int) -> Text:
    is_peak = phase.name == gpu.peak_phase
    over = phase.total_bytes > gpu.capacity_bytes
    number = f"{_gib(phase.total_bytes):>{NUMBER_WIDTH - 2}}" + (" ◂" if is_peak else "")
    style = ("bold " if is_peak else "") + ("red" if over else "")
    return Text.assemble((f"{_phase_word(phase):<{PHASE_WIDTH}}", "bold" if is_peak else ""), _bar(phase, gpu, bar_width), (number, style.strip()))


def _bar(phase: PhaseMemory, gpu: GpuMemory, bar_width: int) -> Text:
    """The groups of a phase side by side; `▏` marks the end of the card, which a bar that does not fit crosses."""
    inside = bar_width - 1
    scale_bytes = max(gpu.capacity_bytes, gpu.peak_bytes)
    sizes = [sum(phase.components.get(component, 0) for component in components) for _, _, _, components in GROUPS]
    ends = [0, *(round(end * inside / scale_bytes) for end in accumulate(sizes))]
    bar = Text()
    for (_, glyph, colour, _), start, end in zip(GROUPS, ends, ends[1:], strict=False):
        bar.append(glyph * (end - start), style=colour)
    bar.append(" " * (inside - len(bar.plain)))
    card_end = round(gpu.capacity_bytes * inside / scale_bytes)
    return bar[:card_end] + Text("▏", style="bold") + bar[card_end:]


def _legend(estimate: Estimate) -> Text:
    present = {component for gpu in estimate.gpus for phase in gpu.phases for component in phase.components}
    legend = Text(f"{'GiB':<{LABEL_WIDTH}}", style="dim")
    for name, glyph, colour, components in GROUPS:
        if present.intersection(components):
            legend += Text.assemble((glyph, colour), f" {name}  ")
    return legend


def _parts(phase: PhaseMemory) -> list[str]:
    """The components of a phase, the largest first; those too small to print together as the last."""
    return _sized(sorted(phase.components.items(), key=lambda item: -item[1]))


def _sized(parts: Sequence[tuple[str, int]]) -> list[str]:
    """Names with sizes in GiB; what would print as 0.0 is added up."""
    large = [(name, size) for name, size in parts if size >= SMALLEST_BYTES]
    rest_bytes = sum(size for _, size in parts if size < SMALLEST_BYTES)
    return [f"{_words(name)} {_gib(size)}" for name, size in [*large, ("rest", rest_bytes)] if size >= SMALLEST_BYTES]


def _detail(parts: Mapping[str, int]) -> str:
    """What a component is made of: sizes added up, then what they hold, in brackets."""
    sizes = _sized([(name, value) for name, value in parts.items() if not name.endswith(COUNTS)])
    counts = [f"{format_count(value)} {_words(name)}" for name, value in parts.items() if name.endswith(COUNTS)]
    return " + ".join(sizes) + (f" ({', '.join(counts)})" if counts else "")


def _sum(parts: Mapping[str, int]) -> str:
    return _gib(sum(value for name, value in parts.items() if not name.endswith(COUNTS)))


def _words(name: str) -> str:
    return name.replace("_", " ")


def _alternative(other: Alternative, best: Estimate) -> str:
    return f"{other.label}: {_outcome(other.estimate, best)}" + (f"; {other.note}" if other.note else "")


def _remedy(remedy: Remedy, best: Estimate) -> str:
    return f"{remedy.change}: {_outcome(remedy.estimate, best)}" + (f"; {remedy.note}" if remedy.note else "")


def _outcome(estimate: Estimate, best: Estimate) -> str:
    """What another answer comes to, and what it stands on where that is not what the recommended one stands on."""
    gpu = _tightest(estimate)
    evidence = "" if estimate.evidence == best.evidence else f" ({estimate.evidence})"
    if not estimate.fits:
        return f"does not fit, up to {format_gib(estimate.over_bytes, 1)} over in the {_phase_word(gpu.peak)}{evidence}"
    speed = tokens_per_second(estimate.throughput.tokens_per_second)
    return f"fits in {_gib(gpu.peak_bytes)} of {format_gib(gpu.capacity_bytes, 1)}, about {speed}{evidence}"


def _tightest(estimate: Estimate) -> GpuMemory:
    """The GPUs with the least room left at the accepted risk."""
    return max(estimate.gpus, key=lambda gpu: gpu.interval_bytes[1] - gpu.capacity_bytes)


def _listed(label: str, items: Sequence[str], width: int) -> Iterator[Text]:
    for number, item in enumerate(items):
        yield from _wrapped(label if number == 0 else "", [item], width, hanging=2)


def _wrapped(label: str, items: Sequence[str], width: int, *, style: str = "", separator: str = " · ", hanging: int = 0) -> Iterator[Text]:
    """Items side by side, broken between items where they are longer than a line, and between words where one item is."""
    room = width - LABEL_WIDTH
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(separator) + len(item) <= room:
            lines[-1] += separator + item
        else:
            lines.extend(_broken(item, room, hanging))
    for number, line in enumerate(lines):
        yield Text.assemble((f"{label if number == 0 else '':<{LABEL_WIDTH}}", "dim"), (line, style))


def _broken(item: str, room: int, hanging: int) -> list[str]:
    """One item in lines of at most `room` columns; a word that is longer keeps its line to itself."""
    lines = [""]
    for word in item.split(" "):
        if lines[-1].strip() and len(lines[-1]) + 1 + len(word) > room:
            lines.append(" " * hanging + word)
        else:
            lines[-1] += (" " if lines[-1].strip() else "") + word
    return lines


def _joined(lines: Sequence[Text]) -> Text:
    for line in lines:
        line.rstrip()
    return Text("\n").join(lines)


def _phase_word(phase: PhaseMemory) -> str:
    return _words(phase.name)


def _gpu_range(first: int, count: int) -> str:
    return f"GPU {first}" if count == 1 else f"GPU {first}-{first + count - 1}"


def _gib(size_bytes: int) -> str:
    return format_gib(size_bytes, 1).removesuffix(" GiB")


def _percent(probability: float) -> str:
    """Rounded down and never 100 %: nothing here is certain."""
    return f"{min(int(probability * 1000), 999) / 10:g} %"


def tokens_per_second(tokens: float) -> str:
    """Two figures: more is not known."""
    return f"{format_count(int(float(f'{tokens:.2g}')))} tokens/s"


def _about_seconds(seconds: float) -> str:
    """Two figures, as of the tokens: `7.5 s`, `33 s`, `12 min`."""
    rounded = float(f"{seconds:.2g}")
    return f"{rounded:g} s" if rounded < SECONDS_IN_WORDS else f"{rounded / 60:.0f} min"
