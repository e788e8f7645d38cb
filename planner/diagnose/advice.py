"""What an incident means, and what of it can be turned without knowing the job."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from planner.diagnose.incident import Incident, Kind
from planner.units import GIB, format_count, format_gib, format_size

OTHERS_WORTH_SAYING_BYTES = GIB // 2  # a desktop and the contexts of idle processes hold less
EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Words:
    """What is said of a kind of incident."""

    happened: Callable[[Incident], str]
    turn: Callable[[Incident], Iterator[str]]


def what_happened(incident: Incident) -> str:
    """One line with the figures of the message."""
    return " ".join(part for part in (_of_rank(incident), WORDS[incident.kind].happened(incident)) if part)


def advice(incident: Incident) -> tuple[str, ...]:
    """What to turn, the surest first."""
    return tuple(WORDS[incident.kind].turn(incident))


def _of_rank(incident: Incident) -> str:
    return f"{incident.rank}:" if incident.rank else ""


# -- what happened -----------------------------------------------------------------------------------------------------


def _place(incident: Incident) -> str:
    return f" in the {incident.phase.replace('_', ' ')}" if incident.phase is not None else ""


def _on_gpu(incident: Incident) -> str:
    card = "the GPU" if incident.gpu is None else f"GPU {incident.gpu}"
    if "tried" not in incident.sizes:
        return f"{card} ran out of memory{_place(incident)}"
    free, total = (format_size(incident.sizes[name]) if name in incident.sizes else "?" for name in ("free", "total"))
    return f"{card} ran out of memory{_place(incident)}: asked for {format_size(incident.sizes['tried'])}, {free} of {total} were free"


def _in_a_library(incident: Incident) -> str:
    return f"a library of CUDA found no memory{_place(incident)}; its message has no figures"


def _in_nccl(incident: Incident) -> str:
    asked = f" for {format_size(incident.sizes['tried'])}" if "tried" in incident.sizes else ""
    return (
        f"NCCL asked the driver{asked} and got nothing{_place(incident)}: PyTorch's allocator had taken what was left"
    )


def _engine_start(incident: Incident) -> str:
    free, total, wanted = (incident.sizes.get(name, 0) for name in ("free", "total", "wanted"))
    share = incident.numbers.get("utilization", 0.0)
    return (
        f"vLLM did not start: gpu_memory_utilization {share:g} is {format_gib(wanted)} of a card of {format_gib(total)}, "
        f"of which {format_gib(free)} were free"
    )


def _engine_cache(incident: Incident) -> str:
    return "vLLM did not start: its weights and its trial run leave nothing of gpu_memory_utilization for a KV cache"


def _engine_length(incident: Incident) -> str:
    length = format_count(int(incident.numbers.get("length", 0)))
    if "needed" not in incident.sizes:
        return f"vLLM did not start: its KV cache holds fewer than the {length} tokens of max_model_len"
    needed, there = (format_gib(incident.sizes[name]) for name in ("needed", "available"))
    return f"vLLM did not start: a sequence of max_model_len {length} needs a KV cache of {needed}, there were {there}"


def _engine_pool(incident: Incident) -> str:
    return "vLLM did not start: its sleep mode keeps memory in a pool, which expandable segments exclude"


def _engine_wake(incident: Incident) -> str:
    return "vLLM woke up, and what it had given back to sleep was taken by the trainer"


def _engine_profile(incident: Incident) -> str:
    return "vLLM did not start: another process on the card gave memory back while vLLM measured its own"


def _on_host(incident: Incident) -> str:
    asked = f", which was asked for {format_size(incident.sizes['tried'])}" if "tried" in incident.sizes else ""
    return f"a process was ended for want of main memory{asked}: the host, not a GPU"


# -- what to turn ------------------------------------------------------------------------------------------------------


def _for_gpu(incident: Incident) -> Iterator[str]:
    if incident.had_room:
        yield "more was free than was asked for: something else had it a moment before, or the driver refused for another reason; look at the lines before"
        return
    if incident.gathers and incident.phase == "rollout":
        yield "ds3_gather_for_generation false: ZeRO-3 was making the whole policy on every GPU to generate"
    if incident.fragmented:
        unused, lacked = format_size(incident.sizes["unallocated"]), format_size(incident.lacking_bytes)
        yield f"{EXPANDABLE}: the allocator held {unused} that it could not give away, {lacked} more were needed"
    others = incident.sizes.get("others", 0)
    if others >= OTHERS_WORTH_SAYING_BYTES:
        yield f"other processes hold {format_size(others)} of this GPU: end them, or plan with --free-memory"


def _for_nccl(incident: Incident) -> Iterator[str]:
    yield "leave the driver some memory: a smaller batch or length, or torch.cuda.set_per_process_memory_fraction"


def _for_engine_start(incident: Incident) -> Iterator[str]:
    free, total = (incident.sizes.get(name, 0) for name in ("free", "total"))
    share = math.floor(100 * free / total) / 100 if total else 0.0
    if share > 0:
        yield f"vllm_gpu_memory_utilization {share:g} is the largest that this card's free memory allows; what else is on it stays"


def _for_engine_cache(incident: Incident) -> Iterator[str]:
    yield "a larger vllm_gpu_memory_utilization, or a larger vllm_tensor_parallel_size, which cuts the weights"


def _for_engine_length(incident: Incident) -> Iterator[str]:
    if "longest" in incident.numbers:
        yield f"vllm_max_model_length up to {format_count(int(incident.numbers['longest']))} fits into this KV cache"
    yield "prompt_length + max_completion_length is enough: where vllm_max_model_length is not set vLLM takes the model's whole context"


def _for_engine_pool(incident: Incident) -> Iterator[str]:
    yield f"drop {EXPANDABLE}, or set vllm_enable_sleep_mode false"


def _for_engine_wake(incident: Incident) -> Iterator[str]:
    yield "a smaller vllm_gpu_memory_utilization: the trainer's weights, states and what its allocator keeps stay while the engine wakes up"


def _for_engine_profile(incident: Incident) -> Iterator[str]:
    yield "start again when nothing else on the card starts or ends"


def _for_host(incident: Incident) -> Iterator[str]:
    yield "each process loads the model's weights into main memory first; offloaded states and parameters live there: see the plan's line `host`"


def _nothing(incident: Incident) -> Iterator[str]:
    yield from ()


WORDS: dict[Kind, _Words] = {
    "gpu": _Words(happened=_on_gpu, turn=_for_gpu),
    "library": _Words(happened=_in_a_library, turn=_nothing),
    "communication": _Words(happened=_in_nccl, turn=_for_nccl),
    "engine_start": _Words(happened=_engine_start, turn=_for_engine_start),
    "engine_cache": _Words(happened=_engine_cache, turn=_for_engine_cache),
    "engine_length": _Words(happened=_engine_length, turn=_for_engine_length),
    "engine_pool": _Words(happened=_engine_pool, turn=_for_engine_pool),
    "engine_wake": _Words(happened=_engine_wake, turn=_for_engine_wake),
    "engine_profile": _Words(happened=_engine_profile, turn=_for_engine_profile),
    "host": _Words(happened=_on_host, turn=_for_host),
}
