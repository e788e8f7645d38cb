"""Completions of a probe: as long as they may be, and in a probe of many steps as long as the user's until the last."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.models.catalogue import load_model
from planner.rows.lengths import lengths_in_words
from probes.step.built_trainer import EOS, WORD
from probes.step.rollouts import fill_to_full_length, whole_rollout
from probes.task import SHORTEST, Task
from probes.worker.completions import ProbedCompletions
from probes.worker.engines import shortened_rows

CANDIDATE = Candidate(
    model=load_model("Qwen2.5-0.5B"), method="grpo", per_device_train_batch_size=4, num_generations=4,
    prompt_length=8, max_completion_length=100, padded="either",
    completion_lengths=lengths_in_words("p50=30,p95=90,max=100"),
)  # fmt: skip
TASK = Task(candidate=CANDIDATE, device="emulated", folder="", steps=50)


def completions(task: Task, global_step: int) -> ProbedCompletions:
    return ProbedCompletions(task, SimpleNamespace(state=SimpleNamespace(global_step=global_step)))


class TestHowLongTheyAre:
    def test_a_long_probe_has_the_users_lengths_until_its_last_rollout(self) -> None:
        drawn = completions(TASK, 10)(1000, 100)
        assert SHORTEST <= min(drawn) < 30 < 90 < max(drawn) <= 100
        assert set(completions(TASK, 49)(4, 100)) == {100, 99}

    def test_a_rollout_that_serves_several_steps_is_the_last_one_earlier(self) -> None:
        task = replace(TASK, candidate=replace(CANDIDATE, steps_per_generation=4))
        assert completions(task, 46)(4, 100) == [100] * 4  # its prompts pad the batch
        assert len(set(completions(task, 45)(40, 100))) > 2

    @pytest.mark.parametrize(
        "task", [replace(TASK, steps=2), replace(TASK, candidate=replace(CANDIDATE, completion_lengths=None))]
    )
    def test_every_other_probe_has_full_ones_of_which_some_pad_the_batch(self, task: Task) -> None:
        assert completions(task, 0)(8, 100) == [100, 100, 100, 99, 100, 100, 100, 99]
        unpadded = replace(task, candidate=replace(task.candidate, padded=False))
        assert completions(unpadded, 0)(8, 100) == [100] * 8


class TestTheirTokens:
    def test_a_short_one_ends_with_an_end_token(self) -> None:
        tokens = torch.full((2, 6), EOS)
        fill_to_full_length(tokens, EOS, [6, 3])
        assert tokens[0].tolist() == [WORD] * 6
        assert tokens[1].tolist()[:3] == [WORD, WORD, EOS]

    def test_no_more_tokens_are_generated_than_the_longest_has(self) -> None:
        config = SimpleNamespace(max_new_tokens=100)
        model: Any = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=EOS))

        def generate(_: Any, input_ids: torch.Tensor, generation_config: Any) -> torch.Tensor:
            new = torch.full((input_ids.size(0), generation_config.max_new_tokens), WORD)
            return torch.cat([input_ids, new], dim=1)

        prompts = {"input_ids": torch.full((2, 8), WORD), "generation_config": config}
        found = whole_rollout(lambda rows, most: [20, 5])(generate, model, prompts)
        assert found.shape == (2, 28)
        assert found[1, 12] == EOS
        assert config.max_new_tokens == 100

    def test_those_of_an_engine_are_cut(self) -> None:
        assert shortened_rows([[1, 2, 3], [4, 5, 6]], [3, 2]) == [[1, 2, 3], [4, 5]]
        assert shortened_rows(None, [1]) is None
