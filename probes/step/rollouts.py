"""Rollouts of full length: no completion ends early by chance.

If nothing else pads a batch, some completions end one token early.
"""

import copy
import importlib
import queue
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from planner.candidate import Candidate
from probes.step.built_trainer import EOS, WORD
from probes.step.phases import Rollout

# Returns how many tokens each completion of a rollout has, from how many completions there are and the most tokens.
CompletionTokens = Callable[[int, int], Sequence[int]]


def whole_rollout(completion_tokens: CompletionTokens) -> Rollout:
    """Return a rollout that runs `generate`, whose end and padding tokens are replaced by words afterwards.

    It generates as many tokens as the longest completion has; the others end where theirs end.
    """

    def run(generate: Callable[..., Any], model: Any, arguments: dict[str, Any]) -> Any:
        prompts, config = arguments["input_ids"], arguments.get("generation_config", model.generation_config)
        most: int = config.max_new_tokens or 0
        tokens = completion_tokens(prompts.size(0), most) if most else ()
        if max(tokens, default=most) < most:
            config = copy.deepcopy(config)
            config.max_new_tokens = max(tokens)
            arguments = arguments | {"generation_config": config}
        result = generate(model, **arguments)
        sequences = result if isinstance(result, torch.Tensor) else result.sequences
        completions = sequences[:, prompts.size(1) :]
        fill_to_full_length(
            completions, model.generation_config.eos_token_id, tokens or completion_tokens(*completions.shape)
        )
        return result

    return run


def short_row(candidate: Candidate) -> int:
    """Return n if every n-th completion is one token short, which pads the batch; 0 if none is.

    None is short if the prompts pad the batch already. n is at least 2: a single row has nothing to be padded to.
    """
    return max(2, candidate.per_device_train_batch_size) if candidate.pads and not candidate.prompts_differ else 0


def fill_to_full_length(completions: torch.Tensor, ends: int | list[int] | None, tokens: Sequence[int]) -> None:
    """Replace end and padding tokens by words, in place; a completion with fewer `tokens` ends with an end token.

    `ends`: the token ids that end a completion of the model; the trainer's tokenizer has another one.
    """
    completions[completions < WORD] = WORD
    for end in [ends] if isinstance(ends, int) else ends or ():
        completions[completions == end] = WORD
    for row, count in enumerate(tokens):
        if count < completions.size(1):
            completions[row, count - 1 :] = EOS


# Words that a teacher scores at each place: `teacher_top_k` and the sampled one. Source: trl 1.16, experimental/
# async_distillation/async_distillation_config.py.
TEACHER_WORDS = 9


class EndlessRollouts:
    """In place of an asynchronous trainer's worker and of its queue: completions of full length, without a server.

    Source: trl 1.16, experimental/async_grpo/async_grpo_trainer.py, `RolloutWorkerProtocol`.
    """

    def __init__(self, candidate: Candidate) -> None:
        self.rollout_buffer, self.metrics_queue = self, queue.Queue[Any]()
        self._candidate, self._random = candidate, random.Random(0)
        self._sampled, self._version = 0, 0
        self._prompt: list[int] = []

    def get(self, timeout: float) -> Any:
        """Return the next completion, of the policy's present version."""
        row = self._candidate.method_row
        worker = importlib.import_module(f"{row.module}.async_rollout_worker")  # warns where it is imported
        prompt, completion = self._candidate.prompt_length, self._candidate.max_completion_length
        group, place = divmod(self._sampled, self._candidate.packed_group)
        if place == 0:
            self._prompt = self._tokens(prompt)
        self._sampled += 1
        tokens = prompt + completion
        if row.teacher_server:
            scored = {
                "teacher_topk_ids": np.full((tokens, TEACHER_WORDS), WORD),
                "teacher_topk_logprobs": np.full((tokens, TEACHER_WORDS), -3.0, dtype=np.float32),
                "teacher_id": "default",
                "prompt_id": group,
            }
        else:
            unchanged: Any = np.zeros(tokens, dtype=np.float32)
            scored = {"advantage": 1.0, "old_log_probs": unchanged, "group_id": group}
        return worker.RolloutSample(
            prompt=[], completion=[], input_ids=np.array(self._prompt + self._tokens(completion)),
            completion_mask=np.array([0] * prompt + [1] * completion), metrics={}, model_version=self._version,
            **scored,
        )  # fmt: skip

    def _tokens(self, count: int) -> list[int]:
        return self._random.choices(range(WORD, self._candidate.model.vocab_size), k=count)

    def qsize(self) -> int:
        return 0

    def start(self) -> None:
        """There is nothing to start."""

    def stop(self) -> None:
        """There is nothing to stop."""

    def update_model_version(self, model_version: int) -> None:
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """There is no process that could hang."""


class NoTeacher:
    """In place of the client to a teacher's server: every word has the same log-probability.

    Source: trl 1.16, generation/vllm_client.py, `VLLMClient.get_sequence_logprobs`.
    """

    def get_sequence_logprobs(
        self, sequences: list[list[int]], prompt_lengths: list[int], top_logprobs: int, temperature: float
    ) -> dict[str, list[Any]]:
        """Return the scores of each completion: of its words, and of the most likely ones."""
        rows = [row[length:] for row, length in zip(sequences, prompt_lengths, strict=True)]
        return {
            "actual_logprobs": [[[-1.0] for _ in row] for row in rows],
            "logprobs": [[[-1.0] * top_logprobs for _ in row] for row in rows],
            "logprob_token_ids": [[[word] * top_logprobs for word in row] for row in rows],
        }


class NoServer:
    """In place of AsyncGRPO's transfer of weights, and of its client to a server that loads adapters.

    Weights are gathered one by one, adapters are written to their folder, and nobody reads them.
    Source: trl 1.16, experimental/async_grpo/async_grpo_trainer.py, `WeightTransferProtocol`, `select_adapter_sync`;
    vllm_client.py, `VLLMClient`.
    """

    def __init__(self, candidate: Candidate) -> None:
        self._rank, self._slots = candidate.adapter_slots

    def get_server_info(self) -> dict[str, dict[str, int]]:
        lora = {"max_lora_rank": self._rank, "max_loras": self._slots}
        return {"lora_config": lora, "parallel_config": {"data_parallel_size": 1}}

    def send_weights(self, iterator: Iterator[Any]) -> None:
        for _ in iterator:
            pass

    def _nothing(self, *_: Any) -> None:
        """There is no server."""

    wait_for_server_ready = init_weight_transfer = pause = resume = destroy = _nothing
    load_lora_adapter = unload_lora_adapter = _nothing
