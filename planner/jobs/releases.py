"""Two releases of the training stack to compare, and the facts that differ between them for a candidate."""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from planner.candidate import TORCH_VERSIONS, Candidate, TorchVersion, known_torch, usual_values
from planner.errors import InputError, shortened
from planner.files.read import MAX_DOCUMENT_BYTES, open_regular
from planner.gpus.cluster import Gpu
from planner.methods import NEWEST_TRL, OLDEST_TRL, Loss, release
from planner.models.recurrent import states_of
from planner.settings.vllm_releases import (
    BLACKWELL_OF_DATA_CENTRES,
    LARGE_BATCH_GIB,
    NEWEST_TAKEN,
    SPARK,
    TORCH_OF_VLLM,
    TRANSFORMERS_BELOW,
    VLLM_VERSIONS,
    VllmFact,
    measures_graphs,
    required,
    vllm_has,
)
from planner.units import GIB

Library = Literal["trl", "torch", "vllm"]
# A pin leaves one minor release: == or ===, or ~= with three numbers.
PINNED = r"(?m)^\s*{library}(?:\[[^\]]*\])?\s*(?:===?|~=(?=\s*\d+\.\d+\.\d))\s*(\d+\.\d+)"


class Releases(Struct, frozen=True, kw_only=True):
    """The releases of a run. `torch`: the planned release whose facts hold for the run's torch (see `known_torch`)."""

    trl: str = NEWEST_TRL
    vllm: str = ""  # "": not given
    torch: TorchVersion | None = None  # None: not given
    pinned_torch: str | None = None


def read_releases(text: str) -> Releases:
    """Return the releases that a text names: one of TRL, pins such as trl==1.16,vllm==0.27, or a requirements file.

    The TRL of pins without one is the newest; a file must pin it.

    Raises:
        InputError: it is none of these, or the file cannot be read or pins no TRL, or the release is not planned.
    """
    if re.fullmatch(r"\d+\.\d+(\.\d+)?", text):
        return Releases(trl=_planned(text))
    if re.search("[=~]=", text):
        return _pinned(text.replace(",", "\n"), text)
    try:
        with open_regular(Path(text), MAX_DOCUMENT_BYTES) as file:
            pins = file.read().decode("utf-8", errors="replace")
    except InputError as error:
        ways = f"a release of TRL, such as {NEWEST_TRL}, pins such as vllm=={NEWEST_TAKEN}, or a requirements file"
        raise InputError(f"{error} Name {ways}.") from error
    if _pin("trl", pins) is None:
        raise InputError(f"{text} pins no release of TRL: it has no line such as trl==1.16.0.")
    return _pinned(pins, text)


def _pinned(pins: str, text: str) -> Releases:
    """Return the releases of lines that pin them. `text`: their origin, for an error."""
    trl, torch, vllm = (_pin(library, pins) for library in ("trl", "torch", "vllm"))
    if trl is None and torch is None and vllm is None:
        ways = f"such as vllm=={NEWEST_TAKEN} or vllm~={NEWEST_TAKEN}.0"
        loose = f" (~={NEWEST_TAKEN} takes later releases, too)" if "~=" in text else ""
        raise InputError(f"{shortened(text)} pins none of trl, torch and vllm, {ways}{loose}.")
    found = Releases(trl=_planned(trl or NEWEST_TRL), vllm=vllm or "")
    return found if torch is None else replace(found, torch=known_torch(torch), pinned_torch=torch)


def _pin(library: str, pins: str) -> str | None:
    """Return the minor release to which lines pin a library; None: they do not."""
    found = re.search(PINNED.format(library=library), pins)
    return None if found is None else found[1]


def _planned(trl: str) -> str:
    if release(trl) < release(OLDEST_TRL):
        raise InputError(f"TRL {trl} is older than {OLDEST_TRL}, the oldest release whose facts are known.")
    return trl


class Fact(Struct, frozen=True, kw_only=True):
    """A fact that depends on a library's release. `value`: reads it from a candidate, as the formulas do.

    `words`: a sentence; `{now}` is the value with the later release, `{before}` with the one before. `default_of`: the
    setting whose default it is. `cards`: those whose runs it concerns.
    """

    library: Library
    value: Callable[[Candidate], object]
    words: str
    default_of: str = ""
    cards: Callable[[Candidate, Gpu], bool] = lambda at, gpu: True


LOSSES: dict[Loss, str] = {
    "fused": "in chunks that build no logits",
    "chunked_nll": "256 labelled tokens at a time",
    "chunked_float32": "256 labelled tokens at a time, with a float32 copy of the head",
    "logits": "with whole logits",
    "logits_cross_entropy": "with whole logits and a copy of them for the accuracy",
    "divergence": "in tiles of student and teacher that build no logits",
    "jsd": "with whole logits of student and teacher",
    "universal": "with whole logits of student and teacher, and sorted probabilities",
    "liger": "by Liger, with the logits of a chunk at a time",
}


def _drops_head(at: Candidate) -> bool:
    return at.vllm_enable_sleep_mode and at.model.architecture.engine_drops_head


def _engine_has(at: Candidate, fact: VllmFact) -> bool:
    """Return whether the engine's release has a fact; False without an engine."""
    return at.vllm != "off" and vllm_has(at.vllm_release, fact)


def _graphs_are(at: Candidate) -> str:
    """Return whether the engine's CUDA graphs are inside its share of the GPU or beside it."""
    return "inside" if measures_graphs(at.vllm_release, at.engine_runner) else "beside"


def _transformers_of(at: Candidate) -> str:
    """Return the upper bound of the engine's release on transformers, in words."""
    below = required(at.vllm_release, TRANSFORMERS_BELOW)
    return f"below {below}" if below else "without an upper bound"


def _slides(at: Candidate) -> bool:
    """Return whether some of the model's layers have a sliding window."""
    return any(layer.attention.sliding_window is not None for layer, _ in at.model.layer_kinds)


# Sources: the columns and properties that the values read.
FACTS = (
    Fact(
        library="trl",
        value=lambda at: LOSSES.get(at.loss, at.loss),
        words="the loss is computed {now}, not {before}",
    ),
    Fact(
        library="trl",
        value=lambda at: at.use_dora and at.spares_magnitudes,
        words="DoRA's magnitudes stay in float32 where adapters are cast to bfloat16",
    ),
    Fact(
        library="trl",
        value=lambda at: at.separate_reference and at.reference_load_dtype == at.dtype,
        words="a frozen copy that the trainer loads has the policy's dtype, not float32",
    ),
    Fact(
        library="trl",
        value=lambda at: usual_values(at.method_row, at.trl_version)["max_completion_length"],
        words="max_completion_length is {now} where nothing sets it, not {before}",
        default_of="max_completion_length",
    ),
    Fact(
        library="trl",
        value=lambda at: at.vllm_version == "newest" and at.engine_needs_bitsandbytes,
        words="an engine of a 4-bit model needs bitsandbytes, which the newest vLLM that TRL takes lacks",
    ),
    Fact(
        library="vllm",
        value=lambda at: _graphs_are(at) if at.vllm != "off" else "",
        words="CUDA graphs are {now} vllm_gpu_memory_utilization, not {before} it: inside, the KV cache is smaller by "
        "them, not the trainer's room",
    ),
    Fact(
        library="vllm",
        value=lambda at: at.engine_runner if at.vllm != "off" else "",
        words="the engine runs the model by model runner {now}, not {before}: a sampler that copies fewer logits, and "
        "counts of tokens on the GPU",
    ),
    Fact(
        library="vllm",
        value=lambda at: _engine_has(at, "sorts_nothing"),
        words="the sampler sorts no logits of 8 rows and more",
    ),
    Fact(
        library="vllm",
        value=lambda at: _engine_has(at, "windows_in_flight") and _slides(at),
        words="a sequence's share of the KV cache holds two batches in flight, not one, in layers with a window",
    ),
    Fact(
        library="vllm",
        value=lambda at: _engine_has(at, "prefixes_of_hybrids") and bool(states_of(at.model)),
        words="prefix caching is on for models with recurrent states, two of which a sequence keeps, not one",
    ),
    Fact(
        library="vllm",
        value=lambda at: _engine_has(at, "workspace") and at.model.expert_params > 0,
        words="experts compute in a buffer that stays on the GPU, also while the engine sleeps",
    ),
    Fact(
        library="vllm",
        value=lambda at: _engine_has(at, "workspace_discarded") and at.model.expert_params > 0,
        words="the buffer in which experts compute is discarded while the engine sleeps",
    ),
    Fact(
        library="vllm",
        value=lambda at: _engine_has(at, "baseline_after_nccl") and at.vllm_tensor_parallel_size > 1,
        words="NCCL's buffers are outside vllm_gpu_memory_utilization: the baseline is taken after they are there",
    ),
    Fact(
        library="vllm",
        value=lambda at: _engine_has(at, "tunes_kernels") and at.vllm_tensor_parallel_size == 1,
        words="torch.compile times kernels at the start, with a second table of embeddings on one GPU",
    ),
    Fact(
        library="vllm",
        value=lambda at: _engine_has(at, "keeps_tuned_table") and at.vllm_tensor_parallel_size == 1,
        words="the second table of embeddings, on which kernels are timed, is taken from the KV cache and stays while "
        "the engine sleeps",
    ),
    Fact(
        library="vllm",
        value=lambda at: _engine_has(at, "counts_free_memory") and at.model.tied and _drops_head(at),
        words="a tied head that vLLM drops while loading is not added to the KV cache beyond "
        "vllm_gpu_memory_utilization any more",
    ),
    Fact(
        library="vllm",
        value=lambda at: _engine_has(at, "returns_tuned_table") and at.vllm_tensor_parallel_size == 1,
        words="the second table of embeddings, on which kernels are timed, is freed; it was taken from the KV cache, "
        "and stayed while the engine slept",
    ),
    Fact(
        library="vllm",
        value=lambda at: _engine_has(at, "graphs_of_1024"),
        words="on B200 and B300 CUDA graphs are captured for up to 1,024 sequences, not 512",
        cards=lambda at, gpu: gpu.compute_capability[0] == BLACKWELL_OF_DATA_CENTRES,
    ),
    Fact(
        library="vllm",
        value=lambda at: _engine_has(at, "graph_of_all_sequences"),
        words="a CUDA graph is captured for max_num_seqs sequences, also between the steps of 8 and 16",
    ),
    Fact(
        library="vllm",
        value=lambda at: at.vllm == "server" and _engine_has(at, "large_server_batch"),
        words="on cards of 160 GiB and more a server takes 16,384 tokens a batch, not 8,192",
        cards=lambda at, gpu: gpu.total_bytes >= LARGE_BATCH_GIB * GIB,
    ),
    Fact(
        library="vllm",
        value=lambda at: at.vllm == "server" and _engine_has(at, "small_spark"),
        words="on a DGX Spark a server takes 2,048 tokens a batch and 256 sequences, not 8,192 and 1,024",
        cards=lambda at, gpu: gpu.compute_capability == SPARK,
    ),
    Fact(
        library="vllm",
        value=lambda at: at.vllm != "off" and not at.engine_loads,
        words="vLLM has no bitsandbytes any more, with which TRL has it load 4-bit weights",
    ),
    Fact(
        library="vllm",
        value=lambda at: required(at.vllm_release, TORCH_OF_VLLM) if at.vllm != "off" else "",
        words="vLLM requires torch {now}, not {before}",
    ),
    Fact(
        library="vllm",
        value=lambda at: _transformers_of(at) if at.vllm != "off" else "",
        words="vLLM takes transformers {now}, not {before}",
    ),
    Fact(
        library="torch",
        value=lambda at: at.attn_implementation == "sdpa" and at.groups_efficiently,
        words="on a card without FlashAttention's kernels, sdpa has one for fewer heads of keys than of queries",
        cards=lambda at, gpu: not gpu.supports_flash_attention_2 or at.float32_attention,
    ),
)


class Change(Struct, frozen=True, kw_only=True):
    """A fact of a candidate that changed: `since` is the first release of its library with the new value."""

    fact: Fact
    since: str
    words: str

    @property
    def library(self) -> Library:
        return self.fact.library

    def concerns(self, one: Candidate, other: Candidate, gpu: Gpu) -> bool:
        """Return whether it concerns the candidates' runs: their card, and a default that they do not set."""
        default = self.fact.default_of
        given = bool(default) and attrgetter(default)(one) == attrgetter(default)(other)
        return self.fact.cards(one, gpu) and not given


def changes(one: Candidate, other: Candidate) -> Iterator[Change]:
    """Yield the facts that differ between the releases of two candidates of one job, in the order of the releases."""
    first, last = sorted((one, other), key=lambda each: release(each.trl_version))
    steps = [replace(first, trl_version=name) for name in trl_releases(first.trl_version, last.trl_version)]
    yield from _changes("trl", steps, attrgetter("trl_version"))
    engines = sorted(VLLM_VERSIONS.index(each.vllm_release) for each in (one, other))
    steps = [replace(last, vllm_version=name) for name in VLLM_VERSIONS[engines[0] : engines[1] + 1]]
    yield from _changes("vllm", steps, attrgetter("vllm_release"))
    known = sorted(map(TORCH_VERSIONS.index, (one.torch_release, other.torch_release)))
    steps = [replace(last, vllm="off", torch_version=name) for name in TORCH_VERSIONS[known[0] : known[1] + 1]]
    yield from _changes("torch", steps, attrgetter("torch_version"))


def trl_releases(first: str, last: str) -> list[str]:
    """Return the minor releases of TRL from one to another of the same major number."""
    (major, start), (_, end) = release(first), release(last)
    return [f"{major}.{minor}" for minor in range(start, end + 1)]


def _changes(library: Library, steps: Sequence[Candidate], since: Callable[[Candidate], str]) -> Iterator[Change]:
    """Yield the facts of a library that differ between candidates of consecutive releases."""
    for before, now in pairwise(steps):
        for fact in FACTS:
            values = fact.value(before), fact.value(now)
            if fact.library == library and values[0] != values[1]:
                words = fact.words.format(before=values[0], now=values[1])
                yield Change(fact=fact, since=since(now), words=words)
