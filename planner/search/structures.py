"""The structures of a search: every combination of the knobs that runs, with the settings that follow from it."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from typing import Any

from msgspec.structs import replace

from planner.candidate import Candidate
from planner.gpus.cluster import Cluster
from planner.jobs.base_candidate import base_candidate, prefetch_bucket
from planner.jobs.stop import can_precompute
from planner.jobs.stops import LOADED_IN_FLOAT32, STOPS
from planner.models.liger import has_liger_formulas
from planner.search.knobs import CHECKPOINTING, KNOBS, SearchProblem, allowed_by_pins, copies_logits


def combinations(problem: SearchProblem) -> Iterator[Candidate]:
    """Yield every combination of `KNOBS` that passes `is_consistent`.

    The batch, the length and the engine's share of the GPU have their defaults; the search sets them.
    """
    base = with_liger(base_candidate(problem.job, problem.cluster, searched=True), problem)
    choices = [allowed_by_pins(knob(problem), problem.job.pinned) for knob in KNOBS.values()]
    for combination in product(*choices):
        fields: dict[str, Any] = {}
        for change in combination:
            fields.update(change)
        candidate = with_derived_settings(replace(base, **fields), problem)
        if is_consistent(candidate, problem):
            yield candidate


def meets_a_stop(candidate: Candidate, cluster: Cluster) -> bool:
    """Return whether a stop ends the candidate's run."""
    return any(stop.when(candidate, cluster) for stop in STOPS)


def structures(problem: SearchProblem) -> Iterator[Candidate]:
    """Yield every combination that no stop meets, each once."""
    seen = set()
    for candidate in combinations(problem):
        if candidate not in seen and not meets_a_stop(candidate, problem.cluster):
            seen.add(candidate)
            yield candidate


def shared_stop(problems: Iterable[SearchProblem]) -> str:
    """Return the sentence of the first stop that all combinations of the problems meet; empty: there is none."""
    shared, last = STOPS, ""
    for problem in problems:
        for candidate in combinations(problem):
            shared = tuple(stop for stop in shared if stop.when(candidate, problem.cluster))
            if not shared:
                return ""
            last = shared[0].sentence(candidate, problem.cluster, problem.job.given)
    return last


def with_liger(candidate: Candidate, problem: SearchProblem) -> Candidate:
    """Return the candidate with Liger's kernels where model, trainer and GPU have them, unless the job pins them.

    The search does not vary them: by the formulas they are never slower and never need more memory
    (tests/test_levers.py).
    """
    row, model = candidate.method_row, problem.job.model
    can = row.keeps_loss_with_liger(candidate.trl_version) and problem.cluster.gpu.runs_triton
    if (row.head == "score" and model.architecture.liger_refuses_classifier) or candidate.layer_gpus > 1:
        return candidate
    if "use_liger_kernel" in problem.job.pinned or not (can and has_liger_formulas(model)):
        return candidate
    return replace(candidate, use_liger_kernel=True)


def with_derived_settings(candidate: Candidate, problem: SearchProblem) -> Candidate:
    """Return the candidate with the settings that follow from others.

    One process is not sharded, unless DeepSpeed avoids copies of logits. Hybrid sharding has one copy of the model on
    each node that trains.
    vLLM's longest sequence, `vllm_max_model_length`, is one whole row. ZeRO-3 gathers nothing ahead where that ends
    the run (`HEAD_IN_FLIGHT`).

    The reference's log-probabilities are computed before the training where the trainer can: a step has one forward
    pass less, and the pass over the data that replaces them is made once for all epochs. On several nodes that is left
    to the user: the first process writes a file that the others read, so that the nodes must share its folder
    (planner/search/variations.py).
    """
    changes: dict[str, Any] = {}
    if "precompute_ref_log_probs" not in problem.job.pinned and candidate.method_row.precomputes_reference:
        changes["precompute_ref_log_probs"] = can_precompute(candidate, problem.cluster) and candidate.num_nodes == 1
    if (
        candidate.num_processes == 1
        and candidate.scheme_row.launched
        and not problem.offload
        and not copies_logits(problem)
        and "sharding" not in problem.job.pinned
    ):
        changes["sharding"] = "none"
    if candidate.dp_replicate_size > 1 and "dp_replicate_size" not in problem.job.pinned:
        changes["dp_replicate_size"] = candidate.num_processes // problem.cluster.gpus_per_node or 1  # nodes that train
    if LOADED_IN_FLOAT32.when(candidate, problem.cluster) and "dtype" not in problem.job.pinned:
        changes["dtype"] = "float32"
    if "stage3_prefetch_bucket_size" not in problem.job.pinned:
        changes["stage3_prefetch_bucket_size"] = prefetch_bucket(candidate, problem.cluster)
    if candidate.vllm != "off" and "vllm_max_model_length" not in problem.job.pinned:
        changes["vllm_max_model_length"] = candidate.row_tokens
    if candidate.method_row.asynchronous and "token_budget" not in problem.job.pinned:
        changes["token_budget"] = replace(candidate, token_budget=0).tokens
    return replace(candidate, **changes) if changes else candidate


def is_consistent(candidate: Candidate, problem: SearchProblem) -> bool:
    """Return whether a candidate belongs to the problem's tuning class, runs on its GPUs and is no duplicate."""
    quantized = candidate.quantization_row.quantized and candidate.quantization_row.takes_adapters
    of_class = {
        "full": candidate.tuning == "full",
        "lora": candidate.tuning == "lora",
        "qlora": candidate.tuning == "lora" and quantized,
    }
    # DeepSpeed would cast a frozen float32 base to 16 bits, against the pinned dtype.
    loses_pinned_dtype = (
        candidate.tuning == "lora" and problem.job.pinned.get("dtype") == "float32" and candidate.casts == "module"
    )
    newest = candidate.checkpoint_every_n_layers > 1 or candidate.checkpoint_offload  # needs transformers 5.23
    beside_vllm = newest and candidate.vllm != "off"
    # Who asks for both a quantized base and an engine gets them.
    quantizes = problem.job.tuning == "qlora" or "quantization" in problem.job.pinned
    asked = quantizes and any(name.startswith("vllm") for name in problem.job.pinned)
    keeps_base = candidate.engine_keeps_base and not asked
    # TRL documents AsyncGRPO for FSDP2 only (trl 1.16, docs/source/async_grpo_trainer.md)
    undocumented = candidate.method_row.asynchronous and candidate.scheme_row.stage > 0
    return (
        of_class[problem.tuning_class]
        and not (loses_pinned_dtype or keeps_base)
        and not (undocumented and "sharding" not in problem.job.pinned)
        and candidate.num_processes % candidate.dp_replicate_size == 0
        and not (beside_vllm and not problem.job.pinned.keys() & {"checkpoint_every_n_layers", "checkpoint_offload"})
        and not is_duplicate(candidate, problem.job.pinned)
        and candidate.num_processes + candidate.server_gpus <= problem.cluster.num_gpus
        and not (candidate.vllm == "colocate" and candidate.num_processes % candidate.vllm_tensor_parallel_size)
    )


def is_duplicate(candidate: Candidate, pinned: Mapping[str, object]) -> bool:
    """Return whether an unpinned setting differs from its default without an effect.

    - Sharded full fine-tuning keeps float32 weights whatever `dtype` it loads.
    - `ds3_gather_for_generation` has an effect under ZeRO-3 with the trainer's `generate` only.
    - TRL's `activation_offloading` offloads checkpoints already, and without them is not estimated (jobs/stops.py).
    - Checkpoints are offloaded where every layer is one: fewer checkpoints need more memory and save less time.
    """
    every_layer = candidate.gradient_checkpointing and candidate.checkpoint_every_n_layers == 1
    if candidate.checkpoint_offload and not every_layer and not pinned.keys() & CHECKPOINTING:
        return True
    offloads_twice = candidate.activation_offloading and (candidate.checkpoint_offload or not every_layer)
    if offloads_twice and "activation_offloading" not in pinned:
        return True
    sharded = candidate.tuning == "full" and not candidate.scheme_row.whole
    if sharded and candidate.dtype != "float32" and "dtype" not in pinned:
        return True
    gathers = candidate.scheme_row.gathers_to_generate and candidate.vllm == "off"
    return not candidate.ds3_gather_for_generation and not gathers and "ds3_gather_for_generation" not in pinned
