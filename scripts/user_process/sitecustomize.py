"""Imported by every Python process of a start on an emulated machine (scripts/user_start.py), before its program.

It does what a worker of probes does there (probes/worker/worker.py): small values are computed on the host, rank 0 may
run alone, and the process leaves a file with what it allocated. The user's files know nothing of it.
"""

import atexit
import contextlib
import importlib.abc
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

RECORDS = "PLAN_START_RECORDS"  # environment variable: the folder of the files that processes leave
KEPT = contextlib.ExitStack()  # what holds until the process ends
TEACHER = "PLAN_START_TEACHER"  # environment variable: the folder of the model of a teacher's server
ALONE = "PLAN_START_ALONE"  # environment variable: set if rank 0 stands for all ranks


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Call a function with a module as soon as that has been imported."""

    def __init__(self, actions: dict[str, Callable[[Any], None]]) -> None:
        self._actions = actions
        self._loaders: dict[str, Any] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self._actions or name in self._loaders:
            return None
        self._loaders[name] = None  # so that the next line asks the other finders
        spec = importlib.util.find_spec(name)
        if spec is not None:
            self._loaders[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: Any) -> Any:
        return self._loaders[spec.name].create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loaders[module.__name__].exec_module(module)
        self._actions[module.__name__](module)


def launch_rank_0(distributed_run: Any) -> None:
    """Let launchers become rank 0 instead of starting all ranks of a node."""
    if ALONE in os.environ:
        from probes.emulated_gpu.one_rank import become_rank_0

        distributed_run.run = become_rank_0


def use_emulated_card(_: Any) -> None:
    """Before the process group begins: compute small values on the host, and act as the peers of rank 0."""
    from probes.emulated_gpu.peers import answer_for_peers, peers_on_the_cpu
    from probes.emulated_gpu.values import keep_small_values_on_host

    kept = keep_small_values_on_host()
    if ALONE in os.environ and "RANK" in os.environ:
        answer_for_peers()
        kept.enter_context(peers_on_the_cpu())


def divide_experts_evenly(_: Any) -> None:
    """Send as many tokens to each expert: no router computes on an emulated card."""
    from probes.emulated_gpu.peers import even_experts

    KEPT.enter_context(even_experts())


def record_training(trainer: Any) -> None:
    """Let each trainer leave a record of its steps and of what the process allocated."""
    import torch

    from probes.emulated_gpu.peers import wait_for_watchdog

    seen: dict[str, int] = {}

    class Recorded(trainer.TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen["began_at"] = state.global_step

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen["steps"] = state.global_step
            wait_for_watchdog()

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen["evaluations"] = seen.get("evaluations", 0) + 1

    def leave_record() -> None:
        if torch.cuda.is_initialized() and "began_at" in seen:  # not of a server
            seen["allocated"] = torch.cuda.max_memory_allocated()
            seen["reserved"] = torch.cuda.max_memory_reserved()
            Path(os.environ[RECORDS], f"{os.getpid()}.json").write_text(json.dumps(seen), encoding="utf-8")

    trainer.DEFAULT_CALLBACKS.append(Recorded)
    atexit.register(leave_record)


def record_engine(gpu_worker: Any) -> None:
    """Let each process of a vLLM server leave a record of its weights, and of its KV cache with CUDA graphs.

    Source: vllm 0.31, v1/worker/gpu_worker.py, `Worker.determine_available_memory`.
    """
    profile = gpu_worker.Worker.determine_available_memory

    def profiled(worker: Any) -> Any:
        found = profile(worker)
        cache = worker.available_kv_cache_memory_bytes + worker.cudagraph_memory_estimate
        role = "teacher" if worker.model_config.model == os.environ.get(TEACHER) else "engine"
        weights = worker.model_runner.model_memory_usage
        seen = {f"{role}_weights": weights, f"{role}_kv_cache_and_graphs": cache}
        Path(os.environ[RECORDS], f"{os.getpid()}.json").write_text(json.dumps(seen), encoding="utf-8")
        return found

    gpu_worker.Worker.determine_available_memory = profiled


def attend_to_trees(packing: Any) -> None:
    """Let AsyncGRPO load functions that allocate what the Hub's kernel does, which computes on no emulated card."""
    from planner.methods import METHODS
    from probes.layers.cuda.flash_attention import attention_of_packed_rows

    KEPT.enter_context(attention_of_packed_rows(METHODS["async-grpo"]))


def attend_to_rows(trainer: Any) -> None:
    """Let AsyncDistillation load them, too, which the start names (scripts/user_start.py, `trial`)."""
    from planner.methods import METHODS
    from probes.layers.cuda.flash_attention import attention_of_packed_rows

    KEPT.enter_context(attention_of_packed_rows(METHODS["async-distillation"]))


def tell_completions_apart(worker: Any) -> None:
    """Replace the tokens of completions, which are all 0, by random words: AsyncGRPO packs equal ones as one.

    Source: trl 1.16, experimental/async_grpo/packing.py, `TreeRow`.
    """
    import random

    from probes.step.built_trainer import WORD

    loop, words = worker._AsyncRolloutLoop, random.Random(0)
    generate = loop._generate_one_turn

    async def generate_words(self: Any, *arguments: Any) -> Any:
        tokens, *rest = await generate(self, *arguments)
        return [words.randrange(WORD, len(self.tokenizer)) for _ in tokens], *rest

    loop._generate_one_turn = generate_words


def trust_tokenizer_class(tokenization_auto: Any) -> None:
    """Let the model's folder say the class of its tokenizer, which is ours, for each type.

    Transformers distrusts the folders of some types and takes the published class, which reads none of our words
    (transformers 5.23, models/auto/tokenization_auto.py).
    """
    tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS.clear()


ACTIONS = {
    "torch.distributed.run": launch_rank_0,
    "accelerate.state": use_emulated_card,
    "transformers.distributed.expert_parallel": divide_experts_evenly,
    "transformers.trainer": record_training,
    "trl.experimental.async_grpo.async_rollout_worker": tell_completions_apart,
    "trl.experimental.async_grpo.packing": attend_to_trees,
    "trl.experimental.async_distillation.async_distillation_trainer": attend_to_rows,
    "vllm.v1.worker.gpu_worker": record_engine,
    "transformers.models.auto.tokenization_auto": trust_tokenizer_class,
}
if RECORDS in os.environ:  # not in a test, which imports this module
    sys.meta_path.insert(0, AfterImport(ACTIONS))
