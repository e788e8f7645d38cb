"""A candidate and its estimate in words: settings, evidence, whether it fits, and its speed."""

from planner.candidate import Candidate
from planner.confidence import MOST_SPARE, Like, runs_like, shown_probability
from planner.gpus.cluster import SAFE_SHARE, Cluster, HostMemory
from planner.methods import OLDEST_TRL, release
from planner.quantities import Estimate, GpuMemory, Throughput
from planner.search.explain import MIN_REPORTED_BYTES
from planner.search.fit import impractical
from planner.search.variations import Variation
from planner.units import format_count, format_gib, format_share

SHOWN_PART = 0.01  # of a step's time, for a part to be listed
MOST_SECONDS = 600  # a longer step is printed in minutes

STACK = ("torch", "trl")  # libraries whose releases are printed beside a measurement
DEVICE_WORDS = {
    "cuda": "",
    "cpu": " on the CPU",
    "emulated": " by probes of an emulated card",
}


def describe_cluster(cluster: Cluster) -> str:
    """Return the GPUs in words: `2 x A100-40G (39.5 GiB each)`."""
    gpu = cluster.gpu
    nodes = f"{cluster.nodes} nodes of " if cluster.nodes > 1 else ""
    each = " each" if cluster.nodes * cluster.rented_per_node > 1 else ""
    return f"{nodes}{cluster.rented_per_node} x {gpu.name} ({format_gib(gpu.free_bytes, 1)}{each})"


def describe_candidate(candidate: Candidate) -> str:
    """Return a candidate in one line: `LoRA r 16 on a bfloat16 base · DDP · vLLM colocated, asleep while training`."""
    words = (_tuning_words, _sharding_words, _generation_words, _teacher_words)
    return " · ".join(part for part in (each(candidate) for each in words) if part)


def _tuning_words(candidate: Candidate) -> str:
    autocast = ""
    if candidate.dtype == "float32" and candidate.precision != "no":
        # DeepSpeed and FSDP2 cast the weights themselves
        words = " under {} autocast" if candidate.scheme_row.autocasts else " in {}"
        autocast = words.format(candidate.precision)
    if candidate.tuning == "full":
        return f"full fine-tuning of {candidate.dtype} weights{autocast}"
    adapters = "DoRA" if candidate.use_dora else "LoRA"
    row = candidate.quantization_row
    if not row.quantized:
        return f"{adapters} r {candidate.lora_r} on a {candidate.dtype} base{autocast}"
    experts = ", experts too" if row.of_experts and candidate.model.expert_params else ""
    return f"Q{adapters} r {candidate.lora_r} on {row.article} {row.words} base{experts}"


def _sharding_words(candidate: Candidate) -> str:
    offloaded = {
        "optimizer": candidate.offload_optimizer,
        "parameters": candidate.offload_param,
        "checkpoints": candidate.offloads_checkpoints,
    }
    moved = [what for what, there in offloaded.items() if there]
    listed = f"{', '.join(moved[:-1])} and {moved[-1]}" if len(moved) > 1 else "".join(moved)
    name = "hybrid FSDP2" if candidate.dp_replicate_size > 1 else candidate.scheme_row.words
    return name + (f" with {listed} on the host" if moved else "")


def _teacher_words(candidate: Candidate) -> str:
    gpus = candidate.teacher_server_gpus
    return f"teacher on {gpus} GPU{'s' if gpus > 1 else ''}" if gpus else ""


def _generation_words(candidate: Candidate) -> str:
    if not candidate.method_row.generates or not candidate.generated_share:
        return ""
    if candidate.vllm == "server":
        gpus = candidate.server_gpus
        return f"vLLM server on {gpus} GPU{'s' if gpus > 1 else ''}"
    if candidate.vllm == "colocate":
        return "vLLM colocated" + (", asleep while training" if candidate.vllm_enable_sleep_mode else "")
    return "generates with Transformers"


def describe_evidence(estimate: Estimate) -> str:
    """Return the evidence of an estimate in words: `estimated`, `measured (torch 2.13, trl 1.16)`."""
    stack = ", ".join(
        f"{name} {'.'.join(version.split('.')[:2])}" for name, version in estimate.versions if name in STACK
    )
    where = "" if estimate.device == "none" else DEVICE_WORDS[estimate.device]
    return f"{estimate.evidence}{where}" + (f" ({stack})" if stack else "")


def describe_fit(estimate: Estimate) -> str:
    """Return whether an estimate fits, how sure that is, and the peak of the GPUs with the least room.

    Example: `fits, 4.0 GiB (10 %) to spare: 98 % likely to run · peak 35.5 (32.9 to 38.8) of 39.5 GiB in the backward`.
    """
    gpu = tightest(estimate)
    low, high = gpu.interval_bytes
    interval = f"({bare_gib(low)} to {bare_gib(high)})"
    capacity = format_gib(gpu.capacity_bytes, 1)
    peak = f"peak {bare_gib(gpu.peak_bytes)} {interval} of {capacity} in the {readable(gpu.peak.name)}"
    if not estimate.fits and not estimate.tight:
        return f"does not fit, {describe_excess(estimate)} · {peak}"
    spare = max(gpu.capacity_bytes - gpu.peak_bytes, 0)
    room = f"{format_gib(spare, 1)} ({spare / gpu.capacity_bytes:.0%}) to spare".replace("%", " %")
    if estimate.device == "cuda":
        return f"fits, as a probe showed, {room} · {peak}"
    return f"{'tight' if estimate.tight else 'fits'}, {room}:{certainty(estimate).removeprefix(',')} · {peak}"


def verdict_style(estimate: Estimate) -> str:
    """Return the colour of a verdict: green if it fits, yellow at the edge or if it is impractical, else red."""
    if not estimate.fits and not estimate.tight:
        return "red"
    return "yellow" if estimate.tight or impractical(estimate) else "green"


def describe_excess(estimate: Estimate) -> str:
    """Return what an estimate that does not fit has too much of: `up to 25.1 GiB over` on a GPU, or on a node."""
    host = f"{format_gib(estimate.host_over_bytes, 1)} of host memory too much for a node"
    if estimate.host_over_bytes <= 0:
        return f"up to {format_gib(estimate.over_bytes, 1)} over"
    return host if estimate.over_bytes <= 0 else f"up to {format_gib(estimate.over_bytes, 1)} over and {host}"


def describe_host(estimate: Estimate, host: HostMemory) -> list[str]:
    """Return the host memory of a node, needed and present, and the source of what is present if it was assumed.

    Example: `32.3 of 170.0 GiB of memory on each node`, `assumed from Google Cloud a2-highgpu: --host-memory`.
    """
    peak = format_gib(estimate.host_peak_bytes, 1)
    if host.origin == "unlimited":
        return [f"{peak} of memory on each node"]
    size = f"{bare_gib(estimate.host_peak_bytes)} of {format_gib(host.total_bytes, 1)} of memory on each node"
    return [size, f"assumed from {host.source}: --host-memory"] if host.origin == "assumed" else [size]


def describe_host_shortage(estimate: Estimate, host: HostMemory) -> str:
    """Return that a node has too little host memory, with both sizes; empty if it has enough."""
    if estimate.host_over_bytes <= 0:
        return ""
    used = f"{round(100 * SAFE_SHARE)} % of which is planned, as it is assumed"
    source = f" ({used} from {host.source})" if host.origin == "assumed" else ""
    return (
        f"needs {format_gib(estimate.host_peak_bytes, 1)} of host memory on a node of "
        f"{format_gib(host.total_bytes, 1)}{source}"
    )


def describe_saving(remedy: Variation, best: Estimate) -> str:
    """Return by how much the peak falls with a remedy: `saves 2.6 GiB`; empty for little."""
    saved = remedy.saved_bytes(best)
    return f"saves {format_gib(saved, 1)}" if saved >= MIN_REPORTED_BYTES else ""


def describe_probability(estimate: Estimate) -> str:
    """Return the probability that an estimate runs: `97 %`; of one that is tight, `tight, 68 %`.

    Of a release of TRL before 1.0 (`certainty`): `fits` or `tight`.
    """
    if not modelled(estimate):
        return "tight" if estimate.tight else "fits"
    return f"tight, {likely(estimate)}" if estimate.tight else likely(estimate)


def modelled(estimate: Estimate) -> bool:
    """Return whether the code of the TRL release is modelled, so that published runs say how sure an estimate is."""
    return release(estimate.candidate.trl_version) >= release(OLDEST_TRL)


def certainty(estimate: Estimate) -> str:
    """Return how sure it is that an estimate runs: `, 97 % likely to run`.

    Of a release of TRL before 1.0 no number is known, as its own code is not modelled: ` by the code of trl 1.0`.
    """
    return f", {likely(estimate)} likely to run" if modelled(estimate) else f" by the code of trl {OLDEST_TRL}"


def likely(estimate: Estimate) -> str:
    """Return the probability that an estimate runs: `97 %`, at most `99 %`."""
    return f"{round(100 * shown_probability(estimate.fit_probability))} %"


def published_like(estimate: Estimate) -> Like:
    """Return the published runs with as much to spare as the GPUs of an estimate with the least room."""
    gpu = tightest(estimate)
    return runs_like(1 - gpu.peak_bytes / gpu.capacity_bytes, estimate.tight)


def describe_runs(estimate: Estimate) -> str:
    """Return how many published runs with as much to spare ran: `of 194 published runs with as much to spare 192 ran`.

    A tight candidate is compared with those that had as little: `with less than 10 % to spare`.
    """
    like = published_like(estimate)
    room = "as much" if like.spare < MOST_SPARE else "half of the card"
    if not like.at_least:
        room = f"less than {like.spare:.0%}".replace("%", " %")
    return f"of {like.runs} published runs with {room} to spare {like.ran} ran"


def describe_driver(estimate: Estimate) -> str:
    """Return what nvidia-smi shows for the GPUs with the least room: `nvidia-smi shows 38.6 GiB, or up to 39.5`.

    It is more than the peak where there is room: PyTorch keeps blocks that it could give back.
    """
    gpu = tightest(estimate)
    most = gpu.nvidia_smi_interval_bytes[1]
    return f"nvidia-smi shows about {format_gib(gpu.nvidia_smi_bytes, 1)}, up to {bare_gib(most)}"


def tightest(estimate: Estimate) -> GpuMemory:
    """Return the GPUs with the least room left at the accepted risk.

    A vLLM server fills its GPUs up to a share that was set: they count only if that does not fit.
    """
    needing = [gpu for gpu in estimate.gpus if not gpu.serves or gpu.interval_bytes[1] > gpu.capacity_bytes]
    return max(needing, key=lambda gpu: gpu.interval_bytes[1] - gpu.capacity_bytes)


def describe_speed(estimate: Estimate) -> str:
    """Return the speed in words: `about 2,200 tokens/s, 7.5 s a step`."""
    throughput = estimate.throughput
    return f"about {tokens_per_second(throughput.tokens_per_second)}, {about_seconds(throughput.step_seconds)} a step"


def describe_epoch(throughput: Throughput) -> tuple[str, ...]:
    """Return the rows of a dataset in words: their mean, their padding or packing, and the hours of an epoch.

    Empty without their lengths. Example: `412 tokens a row`, `38 % of the computed tokens are padding`, `an epoch:
    52,002 rows in 6,501 steps, 2.3 h`.
    """
    epoch = throughput.epoch
    if epoch is None:
        return ()
    said = [f"{format_count(round(epoch.mean_tokens))} tokens a row"]
    if epoch.layout in ("padded", "padding_free"):
        said.append(f"{format_share(epoch.padding_share)} of the computed tokens are padding")
    else:
        per_row = epoch.drawn_rows / epoch.trained_rows
        said.append(f"{per_row:.1f} rows packed into one, {format_share(epoch.fill)} full")
    if epoch.rows:
        hours = epoch.steps * throughput.step_seconds / 3600
        said.append(f"an epoch: {format_count(epoch.rows)} rows in {format_count(epoch.steps)} steps, {_hours(hours)}")
    return tuple(said)


def _hours(hours: float) -> str:
    """Return a duration rounded to two digits: `2.3 h`, `12 min`."""
    return f"{float(f'{hours:.2g}'):g} h" if hours >= 1 else f"{max(hours * 60, 1):.0f} min"


def describe_step(estimate: Estimate) -> str:
    """Return the parts of a step's time, the largest first: `generation 4.1 s + compute 1.9 s + launch 0.3 s`."""
    throughput = estimate.throughput
    parts = sorted(throughput.seconds.items(), key=lambda part: -part[1])
    shown = [(name, seconds) for name, seconds in parts if seconds >= SHOWN_PART * throughput.step_seconds]
    return " + ".join(f"{name.replace('_', ' ')} {about_seconds(seconds)}" for name, seconds in shown)


def tokens_per_second(tokens: float) -> str:
    """Return a rate rounded to two digits, which is all that is known of it: `2,200 tokens/s`."""
    return f"{format_count(int(float(f'{tokens:.2g}')))} tokens/s"


def about_seconds(seconds: float) -> str:
    """Return seconds rounded to two digits: `7.5 s`, `33 s`, `12 min`."""
    rounded = float(f"{seconds:.2g}")
    return f"{rounded:g} s" if rounded < MOST_SECONDS else f"{rounded / 60:.0f} min"


def bare_gib(size_bytes: int) -> str:
    """Return a number of GiB without the unit."""
    return format_gib(size_bytes, 1).removesuffix(" GiB")


def readable(name: str) -> str:
    """Return the name of a component or a phase with spaces: `optimizer_step` -> `optimizer step`."""
    return name.replace("_", " ")
