"""Text for an out-of-memory error: a description, and settings that help whatever the job is."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from planner.diagnose.incident import Incident, Kind
from planner.units import GIB, format_count, format_gib, format_size

MENTIONED_OTHERS_BYTES = GIB // 2  # least memory of other processes to mention; a desktop and idle processes hold less
SEVERAL = 2  # processes
# Twice a CUDA context with the kernels of PyTorch, which is 0.2 to 0.6 GiB (planner/memory/runtime.py).
CONTEXT_BYTES = 6 * GIB // 5
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True, kw_only=True, slots=True)
class _IncidentText:
    """Functions that write the text for one kind of incident."""

    description: Callable[[Incident], str]
    advice: Callable[[Incident], Iterator[str]]


def describe_incident(incident: Incident) -> str:
    """Describe an incident in one line with the figures of its message."""
    return " ".join(
        part for part in (_rank_prefix(incident), INCIDENT_TEXTS[incident.kind].description(incident)) if part
    )


def advice(incident: Incident) -> tuple[str, ...]:
    """Settings to change, the one most likely to help first."""
    return tuple(INCIDENT_TEXTS[incident.kind].advice(incident))


def _rank_prefix(incident: Incident) -> str:
    return f"{incident.rank}:" if incident.rank else ""


# -- descriptions -----------------------------------------------------------------------------------------------------


def _in_phase(incident: Incident) -> str:
    return f" in the {incident.phase.replace('_', ' ')}" if incident.phase is not None else ""


def _on_gpu(incident: Incident) -> str:
    gpu = "the GPU" if incident.gpu is None else f"GPU {incident.gpu}"
    if "tried" not in incident.sizes:
        return f"{gpu} ran out of memory{_in_phase(incident)}"
    free, total = (format_size(incident.sizes[name]) if name in incident.sizes else "?" for name in ("free", "total"))
    lacking = f"; {format_size(incident.lacking_bytes)} were missing" if incident.lacking_bytes else ""
    doubt = ""
    if incident.is_impossible:
        allocated = format_size(incident.sizes["allocated"])
        doubt = f". Its figures cannot be: {allocated} allocated on a GPU of {total}, so that a part lay elsewhere"
    return (
        f"{gpu} ran out of memory{_in_phase(incident)}: asked for {format_size(incident.sizes['tried'])}, {free} of "
        f"{total} were free{lacking}{doubt}"
    )


def _in_a_library(incident: Incident) -> str:
    return f"a CUDA library could not allocate memory{_in_phase(incident)}; its message has no sizes"


def _in_nccl(incident: Incident) -> str:
    size = f" ({format_size(incident.sizes['tried'])})" if "tried" in incident.sizes else ""
    return (
        f"NCCL asked the driver for memory{size} and got none{_in_phase(incident)}: PyTorch's allocator had reserved "
        "the rest of the GPU"
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
    needed, available = (format_gib(incident.sizes[name]) for name in ("needed", "available"))
    return (
        f"vLLM did not start: a sequence of max_model_len {length} needs a KV cache of {needed}, there were {available}"
    )


def _engine_pool(incident: Incident) -> str:
    return "vLLM did not start: its sleep mode uses a memory pool, which does not work with expandable segments"


def _engine_wake(incident: Incident) -> str:
    return "vLLM could not wake up: the trainer had taken the memory that vLLM freed to sleep"


def _engine_profile(incident: Incident) -> str:
    return "vLLM did not start: another process on the GPU freed memory while vLLM measured its own"


def _on_host(incident: Incident) -> str:
    if "-9" in incident.message or "SIGKILL" in incident.message:
        return "a process was killed (signal 9): by the kernel if main memory ran out (see `dmesg`), else by a launcher"
    size = f", asked for {format_size(incident.sizes['tried'])}" if "tried" in incident.sizes else ""
    return f"the host, not a GPU, ran out of memory{size}; a process was ended"


# -- advice ------------------------------------------------------------------------------------------------------


def _for_gpu(incident: Incident) -> Iterator[str]:
    if incident.had_room:
        yield (
            "more was free than was asked for: another process may have held it a moment before, or the driver "
            "refused for another reason; see the log above this line"
        )
        return
    if incident.gathers and incident.phase == "rollout":
        yield "ds3_gather_for_generation false: ZeRO-3 was gathering the whole policy on every GPU to generate"
    others = incident.sizes.get("others", 0)
    if others >= MENTIONED_OTHERS_BYTES:
        yield _about_others(others, int(incident.numbers.get("other_processes", 1)))
    if incident.fragmented:
        unused, lacked = format_size(incident.sizes["unallocated"]), format_size(incident.lacking_bytes)
        yield f"{EXPANDABLE}: the allocator held {unused} in fragments that it could not use; {lacked} more were needed"


def _about_others(held_bytes: int, processes: int) -> str:
    """Say what the other processes on the GPU are: ranks of the same run if there are several."""
    held = format_size(held_bytes)
    if processes < SEVERAL:
        return f"other processes hold {held} of this GPU: end them, or plan with --free-memory"
    if held_bytes < processes * CONTEXT_BYTES:
        return (
            f"{processes} other processes hold {held} of this GPU, as much as CUDA contexts: ranks that touch a GPU "
            "that is not theirs. torch.cuda.set_device(local_rank) before anything else, map_location when loading"
        )
    return (
        f"{processes} other processes hold {held} of this GPU: it is shared, by ranks that all load to it (device_map, "
        "CUDA_VISIBLE_DEVICES) or by other jobs. One process a GPU, or plan with --free-memory"
    )


def _for_nccl(incident: Incident) -> Iterator[str]:
    yield "leave memory for NCCL: a smaller batch or length, or torch.cuda.set_per_process_memory_fraction"


def _for_engine_start(incident: Incident) -> Iterator[str]:
    free, total = (incident.sizes.get(name, 0) for name in ("free", "total"))
    share = math.floor(100 * free / total) / 100 if total else 0.0
    if share > 0:
        yield (
            f"vllm_gpu_memory_utilization {share:g} is the largest that this GPU's free memory allows while other "
            "processes keep theirs"
        )


def _for_engine_cache(incident: Incident) -> Iterator[str]:
    yield "a larger vllm_gpu_memory_utilization, or a larger vllm_tensor_parallel_size, which shards the weights"


def _for_engine_length(incident: Incident) -> Iterator[str]:
    if "longest" in incident.numbers:
        yield f"vllm_max_model_length up to {format_count(int(incident.numbers['longest']))} fits into this KV cache"
    yield (
        "vllm_max_model_length = prompt_length + max_completion_length is enough; if it is not set, vLLM uses the "
        "model's whole context"
    )


def _for_engine_pool(incident: Incident) -> Iterator[str]:
    yield f"remove {EXPANDABLE}, or set vllm_enable_sleep_mode false"


def _for_engine_wake(incident: Incident) -> Iterator[str]:
    yield (
        "a smaller vllm_gpu_memory_utilization: the trainer's weights, states and reserved memory stay on the GPU "
        "while the engine wakes up"
    )


def _for_engine_profile(incident: Incident) -> Iterator[str]:
    yield "start again while no other process on the GPU starts or ends"


def _for_host(incident: Incident) -> Iterator[str]:
    yield (
        "each process first loads the model's weights into main memory, and offloaded states and parameters stay "
        "there: give what a node has with --host-memory, and see the plan's line `host`"
    )


def _no_advice(incident: Incident) -> Iterator[str]:
    yield from ()


INCIDENT_TEXTS: dict[Kind, _IncidentText] = {
    "gpu": _IncidentText(description=_on_gpu, advice=_for_gpu),
    "library": _IncidentText(description=_in_a_library, advice=_no_advice),
    "communication": _IncidentText(description=_in_nccl, advice=_for_nccl),
    "engine_start": _IncidentText(description=_engine_start, advice=_for_engine_start),
    "engine_cache": _IncidentText(description=_engine_cache, advice=_for_engine_cache),
    "engine_length": _IncidentText(description=_engine_length, advice=_for_engine_length),
    "engine_pool": _IncidentText(description=_engine_pool, advice=_for_engine_pool),
    "engine_wake": _IncidentText(description=_engine_wake, advice=_for_engine_wake),
    "engine_profile": _IncidentText(description=_engine_profile, advice=_for_engine_profile),
    "host": _IncidentText(description=_on_host, advice=_for_host),
}
