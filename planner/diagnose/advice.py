"""Text for an out-of-memory error: a description, and settings that help whatever the job is."""

import math
import re
from collections.abc import Callable, Iterator

from msgspec import Struct

from planner.diagnose.advice_by_phase import (
    ADVICE_ELSEWHERE,
    DRIVER_SAYS,
    IN_ANY_PHASE,
    NO_BATCH,
    OUTSIDE_PYTORCH,
    PAGED,
    PINNED,
    PINNED_WSL,
    SGLANG,
    WRONG_SIZE_OF_GPU,
    advice_for_gpu,
    advice_for_host,
    has_wrong_size,
    no_mapping,
    of_batch,
    of_model_size,
    unknown_phase,
)
from planner.diagnose.incident import WORKER_ENDED, Activity, Incident, IncidentKind
from planner.diagnose.messages import JAX_OR_TENSORFLOW, LLAMA_CPP, device_of
from planner.quantities import Phase
from planner.units import GIB, format_count, format_gib, format_size

MENTIONED_OTHERS_BYTES = GIB // 2  # least memory of other processes to mention; a desktop and idle processes hold less
# Least memory in no named process to mention: judged, twice a CUDA context of 0.5 GiB (OEvortex/unsloth#20).
MENTIONED_UNNAMED_BYTES = GIB
# Ratio of the largest to the smallest process up to which they count as ranks of one run. Judged, not measured.
SAME_SHARE = 1.25
# Numbers that the processes of one launcher lie in, for each of them. Judged: threads and loaders take some between.
NUMBERS_A_RANK = 4
# Of a GPU: memory outside of this process from which it is the likeliest cause. Judged, not measured.
CROWDED_SHARE = 0.1
# Of a GPU: this process's tensors from which ending another process is not all that helps. Judged, not measured.
OWN_SHARE = 0.5
# Of what vLLM wanted: free memory from which it is told to take less. Judged: below, its weights do not fit either.
USEFUL_SHARE = 0.25
ENGINE_PHASES: dict[Phase | None, str] = {"load": "started", "rollout": "generated"}
MEMORY_SAVER = "torch_memory_saver"  # in the messages of the library with which SGLang sleeps
KERNEL_DIED = (
    r"appears to have died|estarting kernel \(|Kernel crashed while|crashed for an unknown reason|"
    r"kernel is unresponsive|DeadKernelError|kernel died"
)
NO_BATCH_FITS = "No executable batch size found"
# Sentences of CUDA's libraries that have other causes, too.
NOT_STARTED = r"NOT_INITIALIZED|INTERNAL_ERROR|valid cuDNN algorithm|unable to find an engine"
# ray, which names three causes: host memory, `ray stop --force`, and a crash
WORKER_DIED = (
    r"(?:worker|actor) died (?:or was killed|unexpectedly)|worker process has died|SIGKILL by OOM killer due to"
)
POOL_DIED = r"BrokenProcessPool|TerminatedWorkerError"
# Source: llama.cpp, tools/server/README.md and common/arg.cpp
LESS_OF_LLAMA_CPP = (
    "llama.cpp takes its KV cache for the whole context as it starts: a smaller n_ctx (-c), a cache in fewer bits "
    "(--cache-type-k q8_0 --cache-type-v q8_0), fewer layers on the GPU (n_gpu_layers, -ngl), or more GPUs "
    "(tensor_split)"
)
SHARD_ELSEWHERE = (
    "if the model itself fills it: weights that are loaded on the host and sharded over several devices, fewer bits a "
    "weight, or a larger device"
)
# Source: JAX's page "GPU memory allocation"; TensorFlow's guide "Use a GPU".
LESS_OF_ROWS = (
    "a smaller batch or shorter rows, a smaller model, or activations that are computed again (jax.checkpoint, "
    "tf.recompute_grad)"
)
ALLOW_GROWTH = (
    "JAX and TensorFlow take most of a GPU as they start: XLA_PYTHON_CLIENT_PREALLOCATE=false and "
    "TF_FORCE_GPU_ALLOW_GROWTH=true take what they need; nvidia-smi shows what else holds the GPU"
)
OWN_POOL = r"_bfc\) ran out of|OOM when allocating tensor"  # of TensorFlow's messages: the pool that it holds is full
POOL_FULL = (
    "its own pool of the GPU is full, which no setting of the pool makes larger: nvidia-smi shows whether another "
    "process or session holds a part of the GPU, which is then to be closed"
)
WITHOUT_ROWS = ("load", "optimizer_step", "weight_sync", "save")  # phases that no batch and no length changes
ROWS_PASS = ("forward", "loss", "backward", "evaluation")  # in which an index of a row may be wrong
WITH_ROWS = ("engine_starts", "engine_profiles")  # vLLM's profile run has rows, though it starts
COLOCATED_ENGINE = (
    "the run's own engine, as the log says that it is colocated: let it sleep (vllm_enable_sleep_mode=true) or start "
    "it after the trainer has loaded, a smaller vllm_gpu_memory_utilization (vLLM's own gpu_memory_utilization), or "
    "GPUs of its own"
)
OWN_GPU = (
    "each rank must choose its own GPU before it loads a model or uses one: torch.cuda.set_device(local_rank), "
    'device_map={"": local_rank}, torch.load(map_location="cpu")'
)
MAY_BE_RANKS = (
    "the log shows several ranks, so first see whether other processes there are those (ps, nvidia-smi): "
    f"{OWN_GPU}. Only if they are of no run that is to go on, end them"
)
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


# Settings of TRL's engine -> vLLM's own, of which some texts have both. Source: trl 1.16, trainer/grpo_config.py.
OWN_NAMES = (
    (r"vllm_(gpu_memory_utilization|tensor_parallel_size)(?: \((?:its own name: |vLLM's own |vLLM's )?\1\))?", r"\1"),
    (r"vllm_max_model_length(?: \(vLLM's max_model_len\))?", "max_model_len"),
    (r"; beside a trainer vllm_enable_sleep_mode=true, or vllm_mode=server on GPUs of its own", ""),
    (r"vllm_enable_sleep_mode=true, or vllm_mode=server on GPUs of its own", "or GPUs of its own"),
    (r"vllm_mode=server on GPUs of its own", "GPUs of its own"),
    (r"by the trainer where they share it \(vllm_mode=server gives vLLM GPUs of its own\), else by", "by"),
    (r"the trainer's weights, states and reserved memory", "what others hold, or took meanwhile, may"),
    (r" \(vLLM's(?: own)?(?: \w+)?\)", ""),
)


class _KindRow(Struct, frozen=True, kw_only=True):
    """One kind of incident: functions that write its text, and what it is of."""

    description: Callable[[Incident], str]
    advice: Callable[[Incident], Iterator[str]]
    of_host: bool = False  # the node ran out of its memory
    of_job: bool = True  # settings of the job decide whether it happens


def describe_incident(incident: Incident) -> str:
    """Describe an incident in one line with the figures of its message."""
    caught = f"; it was caught: the run finished in line {incident.finished} of the log" if incident.finished else ""
    rank = f"{incident.rank}: " if incident.rank else ""
    return rank + INCIDENT_KINDS[incident.kind].description(incident) + caught


def advice(incident: Incident, *, of_job: bool = False) -> tuple[str, ...]:
    """Settings to change, the one most likely to help first; in TRL's names if the job or a trainer is seen."""
    said = tuple(INCIDENT_KINDS[incident.kind].advice(incident))
    return said if of_job or incident.beside.trainer or not incident.of_engine else tuple(map(_in_own_names, said))


def _in_own_names(said: str) -> str:
    """Advice about an engine without a trainer, in vLLM's own names."""
    for of_trl, own in OWN_NAMES:
        said = re.sub(of_trl, own, said)
    return said


# -- descriptions -----------------------------------------------------------------------------------------------------


def _in_phase(incident: Incident) -> str:
    if incident.activity == "prepares" and (INCIDENT_KINDS[incident.kind].of_host or incident.kind == "unsaid"):
        return " as the dataset was prepared"
    if incident.activity == "loads_data" and INCIDENT_KINDS[incident.kind].of_host:
        return " in a data loader"
    if incident.activity == "merges" and incident.phase == "save":
        return " as adapters merged"
    if incident.activity == "offloads" and INCIDENT_KINDS[incident.kind].of_host:
        return " as the optimizer's states were made"
    if in_engine := _in_engine(incident):
        return in_engine
    if incident.phase is None:
        return " in a training step" if incident.activity == "trains" or _has_step(incident) else ""
    return f" in the {incident.phase.replace('_', ' ')}"


def _in_engine(incident: Incident) -> str:
    if incident.activity == "engine_encodes":
        start = ", most likely in the profile run of its start" if _too_large(incident) else ""
        return f" in vLLM's encoder of images{start}"
    if incident.of_engine and incident.phase in ENGINE_PHASES:
        engine = "SGLang" if incident.activity.startswith("sglang") else "vLLM"
        return f" as {engine} {ENGINE_PHASES[incident.phase]}"
    if incident.activity == "engine_samples":
        return " as vLLM sampled, in the warm-up of its start or as it generated"
    if incident.activity == "engine" and incident.beside.serves and not incident.frames:
        return " as vLLM started (the log shows no request that it served)"
    return ""


def _has_step(incident: Incident) -> bool:
    """True if the bar of a training is what ran last, on a GPU."""
    return bool(incident.beside.step and incident.kind == "gpu" and not incident.activity)


def _on_gpu(incident: Incident) -> str:
    gpu = "the GPU" if incident.gpu is None else f"GPU {incident.gpu}"
    if has_wrong_size(incident):
        asked = format_size(incident.sizes["tried"])
        return f"{gpu} was asked{_in_phase(incident)} for {asked}, more than any has: a wrong size, no lack of memory"
    out = f"{gpu} ran out of memory{_in_phase(incident)}"
    if NO_BATCH_FITS in incident.message:
        return f"{out} at every batch size that accelerate tried"
    if "tried" not in incident.sizes:
        return out
    asked = f"{out}: asked for {format_size(incident.sizes['tried'])}"
    if "free" not in incident.sizes or "total" not in incident.sizes:
        return asked
    free, total = (format_size(incident.sizes[name]) for name in ("free", "total"))
    lacking = f", {format_size(incident.lacking_bytes)} too few" if incident.lacking_bytes else ""
    return f"{asked}, {free} of {total} were free{lacking}"


def _in_a_library(incident: Incident) -> str:
    if re.search(NOT_STARTED, incident.message):
        return (
            f"a CUDA library could not start or compute{_in_phase(incident)}: most often the GPU had no memory left "
            "for it, else an earlier error of a kernel, or versions that do not go together"
        )
    if incident.activity == "pins":
        return f"pinned host memory could not be allocated{_in_phase(incident)}, which CUDA reports as the GPU's"
    return f"a CUDA library could not allocate memory{_in_phase(incident)}; its message has no sizes"


def _in_nccl(incident: Incident) -> str:
    size = f" ({format_size(incident.sizes['tried'])})" if "tried" in incident.sizes else ""
    holder = "PyTorch's allocator, an engine or another process" if incident.phase is None else "PyTorch's allocator"
    holder = "the model's weights" if incident.phase == "load" else holder
    return (
        f"NCCL asked the driver for memory{size} and got none{_in_phase(incident)}: {holder} had filled the rest of "
        "the GPU"
    )


def _engine_start(incident: Incident) -> str:
    free, total, wanted = (incident.sizes.get(name, 0) for name in ("free", "total", "wanted"))
    share = incident.numbers.get("utilization", 0.0)
    return (
        f"vLLM did not start: gpu_memory_utilization {share:g} is {format_gib(wanted)} of a GPU of "
        f"{format_gib(total)}, of which {format_gib(free)} were free"
    )


def _engine_cache(incident: Incident) -> str:
    return "vLLM did not start: after its weights and its profile run, gpu_memory_utilization leaves no KV cache"


def _engine_length(incident: Incident) -> str:
    length = format_count(int(incident.numbers.get("length", 0)))
    if "needed" not in incident.sizes:
        return f"vLLM did not start: its KV cache holds fewer than the {length} tokens of max_model_len"
    there = f", there were {format_gib(incident.sizes['available'])}" if "available" in incident.sizes else ""
    needed = format_gib(incident.sizes["needed"])
    return f"vLLM did not start: a sequence of max_model_len {length} needs a KV cache of {needed}{there}"


def _engine_pool(incident: Incident) -> str:
    return "vLLM did not start: its sleep mode uses a memory pool, which does not work with expandable segments"


def _engine_wake(incident: Incident) -> str:
    engine = "SGLang" if MEMORY_SAVER in incident.message else "vLLM"
    return f"{engine} could not wake up: the trainer had taken the memory that {engine} freed to sleep"


def _engine_profile(incident: Incident) -> str:
    return "vLLM did not start: another process on the GPU freed memory while vLLM measured its own"


def _engine_sampler(incident: Incident) -> str:
    sequences = format_count(int(incident.numbers["sequences"])) if "sequences" in incident.numbers else "its most"
    return f"vLLM did not start: sampling for {sequences} sequences at once needs more than it left free"


def _engine_swap(incident: Incident) -> str:
    return (
        "vLLM's KV cache was full, and its own swap space in host memory, to which it moves sequences that wait, was "
        "full too"
    )


def _engine_preempts(incident: Incident) -> str:
    return (
        "vLLM's KV cache was full as it generated, so that sequences had to wait (a warning; the log shows no error "
        "after it)"
    )


def _unsaid(incident: Incident) -> str:
    if incident.where:
        return f"the log ends in a traceback{_in_phase(incident)}, without the line that says what happened"
    if not incident.message:
        return f"the log ends{_in_phase(incident)}, without an error"
    return f"a launcher ended the processes{_in_phase(incident)}, as one had ended, and the log does not say why"


def _dispatched(incident: Incident) -> str:
    return (
        "the model does not fit into the GPU memory that was free as it loaded: parts of it went to the CPU or the "
        "disk, with which it cannot run as asked"
    )


def _sglang(incident: Incident) -> str:
    return "SGLang did not start: mem_fraction_static leaves too little for its pools, or too little beside them"


def _in_shared_memory(incident: Incident) -> str:
    if WORKER_ENDED in incident.message:
        return (
            "a data loader's worker ended and said nothing here: by an error of its own further up, or as /dev/shm is "
            "full, which in containers has 64 MB by default, or as host memory ran out"
        )
    seen = re.search(r"shared memory|/dev/shm|No space left|write to file </torch_", incident.message)
    full = "/dev/shm is full" if seen else "a bus error: most often /dev/shm is full"
    return (
        f"{full}{_in_phase(incident)}: data loader workers and NCCL pass tensors through it, and containers get 64 MB "
        "by default"
    )


def _on_host(incident: Incident) -> str:
    size = f", asked for {format_size(incident.sizes['tried'])}" if "tried" in incident.sizes else ""
    if no_mapping(incident):
        return (
            f"the host could not map{size.removeprefix(', asked for')} more{_in_phase(incident)}: most often a process "
            "has as many mappings as it may (vm.max_map_count), or /dev/shm is full"
        )
    if has_wrong_size(incident):
        return f"one tensor on the host was to be larger than any node's memory{size}: most often a wrong shape"
    return f"the host, not a GPU, ran out of memory{_in_phase(incident)}{size}{_host_use(incident)}"


def _host_use(incident: Incident) -> str:
    """Host memory in use, as Ray's, DeepSpeed's or the kernel's message has it."""
    if "killed" in incident.sizes:
        return f", the killed process held {format_gib(incident.sizes['killed'])}"
    used = incident.sizes.get("host_used", incident.beside.host_used)
    total = incident.sizes.get("host_total", incident.beside.host_total)
    if limit := incident.beside.limit:
        return f", whose limit was {format_gib(limit)}"
    return f", {format_gib(used)} of {format_gib(total)} were in use" if used and total else ""


def _was_killed(incident: Incident) -> str:
    if "during map" in incident.message:
        return f"a worker that prepared the dataset died{_host_use(incident)}: most often host memory ran out"
    if re.search(POOL_DIED, incident.message):
        return f"a worker process of a pool died{_in_phase(incident)}: most often host memory ran out, else it crashed"
    if re.search(KERNEL_DIED, incident.message):
        return (
            f"the notebook's kernel died{_in_phase(incident)}: most often host memory ran out, else a library crashed "
            "(the terminal in which Jupyter runs, or the same code as a script, shows which)"
        )
    if re.search(WORKER_DIED, incident.message):
        return (
            f"a Ray worker died{_in_phase(incident)}{_host_use(incident)}: most often the host memory ran out, else it "
            "crashed (its own log says so) or was stopped"
        )
    return (
        f"a process was killed (signal 9){_in_phase(incident)}{_host_use(incident)}: most often the host memory "
        "ran out, else a scheduler or somebody ended it"
    )


def _in_a_kernel(incident: Incident) -> str:
    needed, limit = (incident.numbers.get(name, 0) for name in ("needed", "limit"))
    figures = f" ({needed:,.0f} bytes, the GPU has {limit:,.0f})" if needed and limit else ""
    return (
        f"a Triton kernel needs more shared memory than a multiprocessor of this GPU has{figures}: no lack of GPU "
        "memory or of host memory"
    )


def _elsewhere(incident: Incident) -> str:
    memory = "pinned host memory" if "on host" in incident.message else "memory"
    gpu = "" if incident.gpu is None else f" of GPU {incident.gpu}"
    tried, total = (format_size(incident.sizes.get(name, 0)) for name in ("tried", "total"))
    asked = f", asked for {tried}" if "tried" in incident.sizes else ""
    limit = f" of {total}" if asked and "total" in incident.sizes else ""
    return (
        f"{device_of(incident.message)} ran out of {memory}{gpu}{_in_phase(incident)}{asked}{limit}: plan knows "
        "PyTorch on CUDA and ROCm, and has no figures for it"
    )


# -- advice ------------------------------------------------------------------------------------------------------


# Sign in a message without the size of a request -> advice.
NO_SIZE = {
    NO_BATCH_FITS: NO_BATCH,
    "more than 1EB": (
        "more than 1EB cannot be meant: a size that was computed wrongly, or damaged, as when ranks exchange what "
        "does not match; no setting of memory changes it"
    ),
}


def _for_gpu(incident: Incident) -> Iterator[str]:
    no_size = next((line for sign, line in NO_SIZE.items() if sign in incident.message), "")
    if said := WRONG_SIZE_OF_GPU if has_wrong_size(incident) else no_size:
        yield said
        return
    yield from _for_figures(incident)
    if not incident.had_room:
        yield from _for_request(incident)
    elif not incident.was_full:
        yield _had_room(incident)
    if _too_large(incident):
        yield from advice_for_gpu(incident)
    elif not incident.limited or incident.lacking_bytes:  # else the limit alone was in the way
        yield from _for_holders(incident)
    if incident.had_room and incident.was_full:
        yield _had_room(incident)
    if incident.fragmented and not incident.largely_unused and not incident.had_room:
        yield _expandable(incident)


def _for_figures(incident: Incident) -> Iterator[str]:
    """What figures say that cannot be."""
    if incident.impossible:
        yield (
            f"{format_size(incident.held_bytes)} held by PyTorch on a GPU of {format_size(incident.sizes['total'])} "
            "cannot be: the count includes memory that is not on the GPU, as of a sleeping vLLM engine or in Windows' "
            "shared memory"
        )


def _had_room(incident: Incident) -> str:
    earlier = f"the log's first error may be the cause, in {incident.earlier_error}"
    above = "see the log above this line" if incident.line > 1 else "see nvidia-smi"
    return (
        "more was free than was asked for: another process may have held it a moment before, or the driver refused "
        "for another reason, as under a limit of WSL or of the container, or without host memory; "
        f"{earlier if incident.earlier_error else above}"
    )


def _for_holders(incident: Incident) -> Iterator[str]:
    """Advice from the phase, and from what other processes hold: first from what holds more."""
    may_lack = not incident.had_room or incident.was_full or incident.sizes.get("others")
    neighbours = tuple(_for_neighbours(incident)) if may_lack else ()
    if is_crowded := _neighbours_bytes(incident) >= CROWDED_SHARE * incident.sizes.get("total", 0):
        yield from neighbours
    if (not incident.had_room or incident.was_full) and _others_do_not_suffice(incident):
        for_phase = tuple(advice_for_gpu(incident))
        yield from for_phase
        if not for_phase and not (neighbours and is_crowded and not _is_mostly_own(incident)):
            yield unknown_phase(incident)
    if not is_crowded:
        yield from neighbours


def _for_request(incident: Incident) -> Iterator[str]:
    """Advice from what this process asked for, and holds."""
    if _too_large(incident):
        has_rows = incident.phase not in WITHOUT_ROWS or incident.activity in WITH_ROWS
        has_rows = has_rows and incident.activity != "engine_encodes"
        helps = ": a smaller batch or length, or flash attention" if has_rows else ""
        yield f"this request alone is larger than the GPU{helps}"
    if incident.limited:
        yield (
            f"the process may use {format_size(incident.sizes['allowed'])} of the GPU: "
            "torch.cuda.set_per_process_memory_fraction set that limit"
        )
    yield from of_model_size(incident)
    if incident.activity == "gathers" and incident.phase == "rollout":
        yield "ds3_gather_for_generation=false: ZeRO-3 was gathering the whole policy on every GPU to generate"
    if incident.fragmented and incident.largely_unused:
        yield _expandable(incident)


def _too_large(incident: Incident) -> bool:
    """True if the request alone is larger than the GPU, so that nobody else's memory matters."""
    return 0 < incident.sizes.get("total", 0) < incident.sizes.get("tried", 0)


def _expandable(incident: Incident) -> str:
    if incident.old_python:
        return f"PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128, in PyTorch 1.10 or newer: {_fragments(incident)}"
    since = "PyTorch 2.1 or newer with " if incident.before_torch_2_1 else ""
    return f"{since}{EXPANDABLE}: {_fragments(incident)}"


def _fragments(incident: Incident) -> str:
    unused, lacked = format_size(incident.sizes["unallocated"]), format_size(incident.lacking_bytes)
    return f"the allocator held {unused} in fragments that it could not use; {lacked} more were needed"


def _for_neighbours(incident: Incident) -> Iterator[str]:
    """Advice from what other processes hold."""
    others, unnamed = incident.sizes.get("others", 0), incident.sizes.get("unnamed", 0)
    if not others:
        others, unnamed = (unnamed, 0) if incident.numbers.get("other_processes") else (0, unnamed)
    if unnamed >= MENTIONED_UNNAMED_BYTES and not incident.sizes.get("process"):
        size = format_size(unnamed)
        held = f"{size} of this GPU are in no process that the message names, nor in PyTorch's allocator"
        if unnamed >= CROWDED_SHARE * incident.sizes.get("total", 0) and _shows_ranks(incident):
            yield f"{held}: {MAY_BE_RANKS}"
        elif unnamed >= CROWDED_SHARE * incident.sizes.get("total", 0):
            yield (
                f"{held}: see nvidia-smi for another process, such as an earlier run, a notebook or a colocated vLLM, "
                "and end it, or take another GPU (CUDA_VISIBLE_DEVICES); the CUDA context takes about half a GiB"
            )
        else:
            yield f"{held}: the CUDA context and NCCL take about a GiB, other processes the rest (nvidia-smi)"
        return
    if others >= MENTIONED_OTHERS_BYTES:
        count = int(incident.numbers["other_processes"])
        holder = "another process holds" if count == 1 else f"{count} other processes hold"
        little = ", less than was lacking" if others < incident.lacking_bytes else ""
        yield f"{holder} {format_size(others)} of this GPU{little}: {_about_others(incident)}"
    if unnamed >= MENTIONED_UNNAMED_BYTES:
        yield (
            f"{format_size(unnamed)} of this GPU are in no process that the message names: other processes, also "
            "outside of a container (nvidia-smi on the host), or libraries that allocate past PyTorch"
        )


def _others_do_not_suffice(incident: Incident) -> bool:
    """True unless what named processes hold is as much as was lacking, and more than this process's tensors."""
    too_few = incident.sizes.get("others", 0) < max(incident.lacking_bytes, MENTIONED_OTHERS_BYTES)
    return too_few or _is_mostly_own(incident)


def _is_mostly_own(incident: Incident) -> bool:
    """True if this process's tensors are most of what fills the GPU."""
    return incident.sizes.get("allocated", 0) >= OWN_SHARE * incident.sizes.get("total", math.inf)


def _neighbours_bytes(incident: Incident) -> int:
    return incident.sizes.get("others", 0) + incident.sizes.get("unnamed", 0)


def _about_others(incident: Incident) -> str:
    if _are_ranks(incident):
        return f"alike, as other ranks of the run: {OWN_GPU}"
    if _are_neighbours(incident):
        return (
            f"their numbers are close together, as of the ranks of one run. If it is this run: {OWN_GPU}. If an "
            "earlier run has left them, end that"
        )
    if incident.beside.colocated:
        return f"{COLOCATED_ENGINE}; else end it, or plan with --free-memory"
    if _shows_ranks(incident):
        return MAY_BE_RANKS
    return "end them, start fewer there, or plan with --free-memory"


def _shows_ranks(incident: Incident) -> bool:
    """True if the log is of a run with several ranks, so that other processes may be those."""
    return incident.beside.ranks or incident.rank.startswith("rank")


def _are_ranks(incident: Incident) -> bool:
    """True if several processes hold about the same, as the ranks of one run do that were not given a GPU each."""
    smallest, largest = (incident.sizes.get(name, 0) for name in ("smallest_other", "largest_other"))
    return incident.numbers.get("other_processes", 0) > 1 and largest <= SAME_SHARE * smallest


def _are_neighbours(incident: Incident) -> bool:
    """True if the numbers of several other processes are as close together as those that one launcher starts."""
    count = incident.numbers.get("other_processes", 0)
    return count > 1 and incident.numbers["process_numbers"] <= NUMBERS_A_RANK * count


def _for_nccl(incident: Incident) -> Iterator[str]:
    shown = tuple(advice_for_gpu(incident))
    neighbours = "nvidia-smi shows whether two ranks, or another process, are on the same GPU"
    yield from (*shown, neighbours) if shown else (neighbours, unknown_phase(incident))
    if incident.phase != "load":
        yield "leave memory for NCCL outside of PyTorch's allocator: torch.cuda.set_per_process_memory_fraction"


def _for_engine_start(incident: Incident) -> Iterator[str]:
    free, total = (incident.sizes.get(name, 0) for name in ("free", "total"))
    share = math.floor(100 * free / total) / 100 if total else 0.0
    if share > 0 and free >= USEFUL_SHARE * incident.sizes.get("wanted", 0):
        yield (
            f"vllm_gpu_memory_utilization={share:g} is the largest that this GPU's free memory allows while other "
            "processes keep theirs"
        )
    if total:
        yield (
            f"{format_size(total - free)} of the GPU are held before it starts: by the trainer where they share it "
            "(vllm_mode=server gives vLLM GPUs of its own), else by an earlier run or another process (nvidia-smi)"
        )


def _for_engine_cache(incident: Incident) -> Iterator[str]:
    yield "a larger vllm_gpu_memory_utilization, or a larger vllm_tensor_parallel_size, which shards the weights"
    yield (
        "weights in fewer bits, or a profile run that needs less: a smaller max_num_batched_tokens or "
        "vllm_max_model_length; nvidia-smi shows what else holds the GPU"
    )


def _for_engine_length(incident: Incident) -> Iterator[str]:
    if "longest" in incident.numbers:
        longest = int(incident.numbers["longest"])
        yield f"vllm_max_model_length={longest} is the longest that fits into this KV cache (vLLM's max_model_len)"
    yield (
        "vllm_max_model_length = prompt_length + max_completion_length is enough; if it is not set, vLLM uses the "
        "model's whole context"
    )
    yield (
        "a larger KV cache: a larger vllm_gpu_memory_utilization (vLLM's gpu_memory_utilization), more GPUs that share "
        "the weights (tensor_parallel_size), or kv_cache_dtype=fp8"
    )


def _for_engine_pool(incident: Incident) -> Iterator[str]:
    yield f"remove {EXPANDABLE}, or vllm_enable_sleep_mode=false"


def _for_engine_wake(incident: Incident) -> Iterator[str]:
    share = "mem_fraction_static" if MEMORY_SAVER in incident.message else "vllm_gpu_memory_utilization"
    yield (
        f"a smaller {share}: the trainer's weights, states and reserved memory stay on the GPU "
        "while the engine wakes up, and what another process took meanwhile (nvidia-smi)"
    )
    yield (
        "or less of the trainer's on the GPU then: torch.cuda.empty_cache() before it wakes up, or parameters and "
        "states that are offloaded as it generates"
    )


def _for_engine_profile(incident: Incident) -> Iterator[str]:
    yield "start again while no other process on the GPU starts or ends"


def _for_kernel(incident: Incident) -> Iterator[str]:
    if "resource: triton_" in incident.message:  # as inductor names the kernels that it writes
        yield "torch_compile=false, or its mode default instead of max-autotune, which tries fewer kernels"
    yield (
        "another kernel or version of it: attn_implementation=sdpa for attention, use_liger_kernel=false for Liger's; "
        "no batch size or length changes it"
    )


def _for_killed(incident: Incident) -> Iterator[str]:
    if re.search(WORKER_DIED, incident.message):
        yield (
            "dmesg tells whether it was host memory; the log of the worker that died (in Ray's session_latest/logs) "
            "shows a crash"
        )
    else:
        yield "dmesg, or sacct of SLURM, tells whether it was host memory"
    yield from advice_for_host(incident)


def _for_engine_sampler(incident: Incident) -> Iterator[str]:
    yield "a smaller max_num_seqs (vLLM's), or a smaller vllm_gpu_memory_utilization"


def _for_engine_preempts(incident: Incident) -> Iterator[str]:
    yield (
        "a larger KV cache: a larger vllm_gpu_memory_utilization (vLLM's gpu_memory_utilization), more GPUs "
        "(tensor_parallel_size), or kv_cache_dtype=fp8"
    )
    yield (
        "less in it: fewer sequences at once (max_num_seqs, num_generations, n or best_of of a request), a shorter "
        "max_completion_length (max_tokens)"
    )
    if "SWAP mode" in incident.message:
        yield (
            "swapping needs room in host memory: swap_space above 0 (vLLM's, in GiB a GPU); vLLM 0.9 or newer computes "
            "such sequences again instead"
        )


def _for_unsaid(incident: Incident) -> Iterator[str]:
    if incident.where:
        yield "the line after the traceback says what happened: give the log with it, of the rank that failed first"
        yield from (f"if it says out of memory: {line}" for line in advice_for_gpu(incident))
        return
    yield (
        "if it stopped there, the exit code of the process that ended first says why: -9 or 137 is most often host "
        "memory (dmesg shows it), 1 an error of Python in its own log, -11 a crash"
    )
    yield from (f"if it was host memory: {line}" for line in advice_for_host(incident))


def _for_engine_swap(incident: Incident) -> Iterator[str]:
    yield (
        "a larger swap_space (vLLM's, in GiB a GPU; the operating system's swap is another); engines of vLLM 0.9 or "
        "newer do not swap"
    )
    yield (
        "a KV cache that is not full: a larger vllm_gpu_memory_utilization, fewer sequences at once (max_num_seqs, "
        "num_generations), a shorter max_completion_length"
    )


def _for_dispatched(incident: Incident) -> Iterator[str]:
    if incident.beside.without_cuda:
        yield (
            "bitsandbytes found no CUDA, which comes first: torch.cuda.is_available() must be true, and a release of "
            "bitsandbytes for this CUDA be installed"
        )
    yield 'nvidia-smi shows what else holds the GPU; with device_map={"": 0} the error says how much was missing'
    yield from advice_for_gpu(incident)


def _for_sglang(incident: Incident) -> Iterator[str]:
    if re.search(r"smaller|decreas|reduc|lower", incident.message):
        yield SGLANG
        return
    yield "a larger --mem-fraction-static, in which weights and KV cache must fit"
    yield "or weights that need less of it: a larger --tp-size over more GPUs, fewer bits a weight"


def _for_shared_memory(incident: Incident) -> Iterator[str]:
    if "nccl" in incident.message.lower():
        yield "rm /dev/shm/nccl-* while nothing runs there: segments that crashed runs have left"
    yield "docker run --shm-size=16g or --ipc=host; Kubernetes: an emptyDir with medium: Memory at /dev/shm"
    yield "dataloader_num_workers=0 passes no tensors between processes; df -h /dev/shm beside the run shows its use"


# What ran -> advice, where CUDA's "out of memory" is not about what this process holds on the GPU.
LIBRARY_ADVICE: dict[Activity, tuple[str, ...]] = {
    "first_call": (
        "the GPU was full before this process used it: nvidia-smi shows who holds it, such as an earlier run",
    ),
    "pins": (PINNED, PINNED_WSL),
}


def _for_library(incident: Incident) -> Iterator[str]:
    if incident.activity == "engine_wakes":
        yield from _for_engine_wake(incident)
        return
    unified = "pythonInterface" in incident.message  # bitsandbytes 0.49, csrc/pythonInterface.cpp, `cget_managed_ptr`
    if known := (PAGED,) if unified else LIBRARY_ADVICE.get(incident.activity):
        yield from known
        return
    by_driver = re.search(r"error(?: 2 at \S{1,200})?: out of memory", incident.message) is not None
    only_shown = by_driver and incident.phase == "load" and not incident.of_engine
    if only_shown:  # PyTorch's allocator says its own figures: most often the GPU was full beforehand
        yield DRIVER_SAYS
    yield from advice_for_gpu(incident)
    if by_driver and not only_shown:
        yield DRIVER_SAYS if incident.of_engine else OUTSIDE_PYTORCH
    if incident.phase is None and not incident.of_engine:
        yield (
            "in a training step, leave memory outside of PyTorch's allocator: a smaller per_device_train_batch_size or "
            "max_length, or torch.cuda.set_per_process_memory_fraction(0.95); if the model was loading, fewer bits a "
            "weight or more GPUs that share it"
        )
    elif incident.phase not in (None, "load") and not by_driver:
        yield "leave memory outside of PyTorch's allocator: torch.cuda.set_per_process_memory_fraction(0.95)"
    if re.search(NOT_STARTED, incident.message) or ("ALLOC_FAILED" in incident.message and incident.phase in ROWS_PASS):
        yield (
            "if much is free (nvidia-smi), it is no lack of memory: an index that is too large (a token id beyond the "
            "vocabulary; CUDA_LAUNCH_BLOCKING=1 shows it), or versions of cuDNN, CUDA and driver that do not go "
            "together"
        )


def _for_elsewhere(incident: Incident) -> Iterator[str]:
    device = device_of(incident.message)
    if device == LLAMA_CPP:
        yield LESS_OF_LLAMA_CPP
        return
    if device == JAX_OR_TENSORFLOW:
        if incident.phase in ROWS_PASS or incident.phase is None:
            yield LESS_OF_ROWS
        yield POOL_FULL if re.search(OWN_POOL, incident.message) else ALLOW_GROWTH
        yield SHARD_ELSEWHERE
        return
    if incident.activity in ("sglang", "engine", "engine_runs", "engine_samples"):
        yield from advice_for_gpu(incident)
        return
    outside = incident.sizes.get("outside", 0)
    if outside > incident.sizes.get("allocated", 0):
        yield (
            f"{format_size(outside)} are not in tensors but in Metal's other allocations: torch.mps.empty_cache() "
            "between steps, a newer PyTorch if they grow from step to step, and fewer other programs"
        )
    if incident.fragmented:
        yield f"PYTORCH_{device}_ALLOC_CONF=expandable_segments:True: {_fragments(incident)}"
    elif incident.others_bytes >= CROWDED_SHARE * incident.sizes.get("total", 0) > 0:
        others = format_size(incident.others_bytes)
        yield f"{others} of it are not in PyTorch's allocator: most often another process holds them"
    yield from _in_phase_elsewhere(incident)


def _in_phase_elsewhere(incident: Incident) -> tuple[str, ...]:
    if incident.phase is None and incident.activity == "trains":
        return of_batch(incident), IN_ANY_PHASE
    unknown = incident.phase is None and not incident.fragmented
    return (unknown_phase(incident),) if unknown else ADVICE_ELSEWHERE.get(incident.phase, ())


INCIDENT_KINDS: dict[IncidentKind, _KindRow] = {
    "gpu": _KindRow(description=_on_gpu, advice=_for_gpu),
    "library": _KindRow(description=_in_a_library, advice=_for_library),
    "communication": _KindRow(description=_in_nccl, advice=_for_nccl),
    "engine_start": _KindRow(description=_engine_start, advice=_for_engine_start),
    "engine_cache": _KindRow(description=_engine_cache, advice=_for_engine_cache),
    "engine_length": _KindRow(description=_engine_length, advice=_for_engine_length),
    "engine_pool": _KindRow(description=_engine_pool, advice=_for_engine_pool),
    "engine_wake": _KindRow(description=_engine_wake, advice=_for_engine_wake),
    "engine_profile": _KindRow(description=_engine_profile, advice=_for_engine_profile),
    "engine_preempts": _KindRow(description=_engine_preempts, advice=_for_engine_preempts),
    "engine_swap": _KindRow(description=_engine_swap, advice=_for_engine_swap),
    "dispatched": _KindRow(description=_dispatched, advice=_for_dispatched),
    "engine_sampler": _KindRow(description=_engine_sampler, advice=_for_engine_sampler),
    "sglang": _KindRow(description=_sglang, advice=_for_sglang, of_job=False),
    "kernel": _KindRow(description=_in_a_kernel, advice=_for_kernel, of_job=False),
    "shared_memory": _KindRow(description=_in_shared_memory, advice=_for_shared_memory, of_host=True, of_job=False),
    "host": _KindRow(description=_on_host, advice=advice_for_host, of_host=True),
    "killed": _KindRow(description=_was_killed, advice=_for_killed, of_host=True),
    "unsaid": _KindRow(description=_unsaid, advice=_for_unsaid),
    "foreign": _KindRow(description=_elsewhere, advice=_for_elsewhere, of_job=False),
}
