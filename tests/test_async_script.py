"""The exported train.py of AsyncGRPO: what its trainer gets of the user's tokenizer and prompts."""

import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from planner.candidate import Candidate
from planner.launch.script import train_script
from planner.models.catalogue import load_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:You are importing from .trl.experimental"),
    pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated"),
]
KNOWN = "qwen3.jinja"  # of TRL's folder chat_templates: a template that it knows
UNKNOWN = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}{% endfor %}"


class Trainer:
    """In place of AsyncGRPOTrainer: keeps what it gets."""

    got: dict[str, Any] = {}  # noqa: RUF012
    accelerator = type("Accelerator", (), {"end_training": lambda self: None})()

    def __init__(self, **arguments: Any) -> None:
        Trainer.got = arguments

    def train(self, resume_from_checkpoint: object) -> None:
        """There is nothing to train."""

    def save_model(self, folder: str) -> None:
        """There is nothing to save."""


def arguments_of_trainer(folder: Path, monkeypatch: pytest.MonkeyPatch, chat_template: str | None) -> dict[str, Any]:
    """Run the script on a tokenizer with a chat template and prompts that are text; return what the trainer gets."""
    import trl.experimental.async_grpo

    from probes.worker.random_weights import tokenizer

    made_up = tokenizer(100)
    made_up.chat_template = chat_template
    made_up.save_pretrained(folder / "model")
    datasets.Dataset.from_dict({"prompt": ["w5 w6"]}).to_parquet(folder / "data" / "train.parquet")
    candidate = Candidate(model=load_model("Qwen2.5-0.5B"), method="async-grpo", vllm="server")
    (folder / "train.py").write_text(train_script(candidate), encoding="utf-8")
    given = {"model_name_or_path": "model", "dataset_name": "data", "output_dir": "output", "report_to": "none"}
    words = [word for name, value in given.items() for word in (f"--{name}", str(folder / value))]
    monkeypatch.setattr(trl.experimental.async_grpo, "AsyncGRPOTrainer", Trainer)
    monkeypatch.setattr(sys, "argv", ["train.py", *words[:-1], "none", "--bf16", "false"])
    namespace: dict[str, Any] = {"__name__": "train"}
    exec(compile((folder / "train.py").read_text(encoding="utf-8"), "train.py", "exec"), namespace)
    namespace["main"]()
    return Trainer.got


@pytest.mark.parametrize("chat_template", [None, UNKNOWN], ids=["no chat template", "one that TRL does not know"])
def test_rollouts_of_any_tokenizer_begin(
    chat_template: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start stopped: "Unrecognized chat template, failed to add response schema" (results/emulated_situations.md)."""
    from trl.chat_template_utils import parse_response

    got = arguments_of_trainer(tmp_path, monkeypatch, chat_template)
    tokenizer, prompt = got["processing_class"], got["train_dataset"][0]["prompt"]
    asked = tokenizer.apply_chat_template(prompt, return_dict=False, add_generation_prompt=True)
    assert tokenizer.convert_ids_to_tokens(asked)[-2:] == ["w5", "w6"]
    assert parse_response(tokenizer, [7, 8], prefix=asked, tools=[]) == {"role": "assistant", "content": "w7w8"}


def test_a_chat_template_that_trl_knows_keeps_its_calls_of_tools(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trl
    from trl.chat_template_utils import qwen3_template

    text = (Path(trl.__file__).parent / "chat_templates" / KNOWN).read_text(encoding="utf-8")
    assert arguments_of_trainer(tmp_path, monkeypatch, text)["processing_class"].response_template == qwen3_template
