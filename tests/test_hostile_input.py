"""Files and arguments that nobody means: one short line on stderr and exit code 2, without waiting and without a trace.

The fuzz tests change files and arguments that are accepted, and hold every exit code to 0, 2, 3 or 4.
PLAN_FUZZ_EXAMPLES=3000 tries that many of each.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.cli import run
from planner.files.write import write_all

CONFIG: dict[str, Any] = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 4,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "hidden_act": "silu",
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
TRAIN: dict[str, Any] = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B", "per_device_train_batch_size": 2, "max_length": 512, "use_peft": True,
    "lora_r": 8, "lora_target_modules": ["q_proj", "v_proj"], "bf16": True, "env": {"A": "b"}, "deepspeed": None,
}  # fmt: skip
JOB = ["--gpus", "1xT4", "--method", "sft"]
QWEN = ["--model", "Qwen2.5-0.5B", *JOB]
EXIT_CODES = {0, 2, 3, 4}
LONGEST_ERROR = 500  # characters; a usage error lists options
LIMIT_SECONDS = 20.0  # on a busy machine; each takes less than a second
DIGITS = "9" * 5000
BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 10)
)
Capture = pytest.CaptureFixture[str]


def refusal(arguments: list[str], capsys: Capture) -> str:
    """The one line of an error with exit code 2."""
    before = time.monotonic()
    assert run([*arguments, "--quiet"] if arguments[0] != "export" else arguments) == 2
    assert time.monotonic() - before < LIMIT_SECONDS
    said = capsys.readouterr()
    assert said.err.startswith("Error: ") and said.err.count("\n") == 1 and not said.out
    assert len(said.err) <= LONGEST_ERROR and said.err.strip().isprintable()
    return said.err


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def sparse(folder: Path) -> Path:
    with (folder / "large").open("wb") as file:
        file.truncate(200 * 2**20)
    return folder / "large"


NO_FILES: dict[str, Callable[[Path], Path]] = {
    "a pipe": pipe,
    "a device": lambda _: Path("/dev/zero"),
    "a folder": lambda folder: folder,
    "200 MB": sparse,
    "nothing": lambda folder: folder / "nothing",
}
READERS = {
    "config": lambda file: ["estimate", *QWEN, "--config", file],
    "accelerate": lambda file: ["estimate", *QWEN, "--accelerate-config", file],
    "deepspeed": lambda file: ["estimate", *QWEN, "--deepspeed-config", file],
    "cases": lambda file: ["validate", file],
    "export": lambda file: ["export", file, f"{file}.out"],
}


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_regular_file_of_a_sane_size_is_not_read(
    reader: str, kind: str, tmp_path: Path, capsys: Capture
) -> None:
    assert "cannot be read" in refusal(READERS[reader](str(NO_FILES[kind](tmp_path))), capsys)


@pytest.mark.parametrize(
    "text",
    ["a: " + "[" * 5000, "a: 2001-99-99", "a: !!int x", "a: !!python/object:os.system x", "? [a]\n: 1", BOMB,
     f"deepspeed: {'x' * 3000}", f"deepspeed: {'../' * 2000}", "a: \x00", "deepspeed: [1]", "a: *b"],
    ids=str.split,
)  # fmt: skip
def test_yaml_that_cannot_be(text: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "train.yaml").write_text(text)
    refusal(["estimate", *QWEN, "--config", str(tmp_path / "train.yaml")], capsys)


@pytest.mark.parametrize(
    "change",
    [{"num_hidden_layers": 100_000}, {"hidden_size": 10**400}, {"hidden_size": -1}, {"hidden_size": "x" * 5000},
     {"num_attention_heads": 0}, {"vocab_size": [1]}, {"vocab_size": True}, {"model_type": 5}, {"hidden_act": {}}],
    ids=str,
)  # fmt: skip
def test_sizes_of_a_model_that_cannot_be(change: dict[str, Any], tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | change))
    refusal(["--model", str(tmp_path), *JOB], capsys)


@pytest.mark.parametrize(
    "text", ['{"x": ' + "[" * 100_000, f'{{"x": {DIGITS}}}', "\xff", "[]", "null", ""], ids=range(6)
)
def test_json_that_cannot_be(text: str, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    refusal(["--model", str(tmp_path), *JOB], capsys)
    refusal(["export", str(tmp_path / "config.json"), str(tmp_path / "out")], capsys)


@pytest.mark.parametrize("name", ["a\nrm -rf x", "red\x1b[31m", "tab\t"])
def test_a_folder_whose_name_cannot_be_printed_is_refused(name: str, tmp_path: Path, capsys: Capture) -> None:
    """The name would reach scripts, requirements and the terminal."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(CONFIG))
    assert "cannot be printed" in refusal(["--model", str(tmp_path / name), *JOB], capsys)


@pytest.mark.parametrize(
    "arguments",
    [["--max-length", DIGITS], ["--free-memory", f"{DIGITS}GiB"], ["--host-memory", "1e400GiB"], ["--risk", DIGITS],
     ["--set", f"lora_r={DIGITS}"], ["--set", "beta=1e400"], ["--effective-batch-size", DIGITS],
     ["--gpus", f"{DIGITS}xT4"], ["--gpus", f"1x{DIGITS}xT4"], ["--model", "x" * 9000], ["--model", "a/" * 3000],
     ["--trl-version", "1.16\nrm -rf x"], ["--set", f"{'x' * 5000}=1"], ["--set", "lora_target_modules=\x1b[31m"]],
    ids=range(14),
)  # fmt: skip
def test_arguments_that_cannot_be(arguments: list[str], capsys: Capture) -> None:
    refusal([*QWEN, *arguments], capsys)


def test_files_are_written_through_names_that_nobody_knows(tmp_path: Path) -> None:
    """A link at a name that is known before would be followed."""
    victim = tmp_path / "victim"
    victim.write_text("kept")
    for name in ("plan.json.part", ".plan.json"):
        (tmp_path / name).symlink_to(victim)
    write_all({tmp_path / "plan.json": "new"})
    assert (victim.read_text(), (tmp_path / "plan.json").read_text()) == ("kept", "new")
    assert {path.name for path in tmp_path.iterdir()} == {"victim", "plan.json", "plan.json.part", ".plan.json"}


@pytest.mark.parametrize(("redirection", "code"), [(">/dev/full", 1), (">&-", 0), ("2>&-", 0), ("| head -1", 1)])
def test_output_that_nobody_takes_leaves_no_trace(redirection: str, code: int) -> None:
    started = "from planner.cli import main; import sys; sys.argv = ['plan', 'gpus']; main()"
    command = f'set -o pipefail; {sys.executable} -c "{started}" {redirection}'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code and "Traceback" not in done.stderr and "Exception" not in done.stderr


# -- fuzz --------------------------------------------------------------------------------------------------------------

fuzz = settings(
    max_examples=int(os.environ.get("PLAN_FUZZ_EXAMPLES", "25")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
odd_values: st.SearchStrategy[Any] = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-3, 300), st.floats(), st.text(max_size=20),
    st.sampled_from(["auto", "nan", "1e99", "-1", "0", "true", "bfloat16", "../x", "\x1b[0m", 10**30, 2**63, {}, []]),
    st.lists(st.integers(), max_size=3), st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
)  # fmt: skip


def changed(base: dict[str, Any], extra: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """A document with up to four keys replaced, added or dropped."""
    keys = [name for name in (*base, *extra) if name != "model_type"]  # another type imports Transformers
    return st.dictionaries(st.sampled_from(keys), odd_values, min_size=1, max_size=4).map(
        lambda changes: {**base, **changes}
    )


def holds(arguments: list[str]) -> None:
    before = time.monotonic()
    assert run([*arguments, "--quiet"]) in EXIT_CODES
    assert time.monotonic() - before < LIMIT_SECONDS


@fuzz
@given(
    changed(CONFIG, ["rope_scaling", "text_config", "quantization_config", "sliding_window", "layer_types", "head_dim"])
)
def test_any_model_config_is_answered_or_refused(
    tmp_path_factory: pytest.TempPathFactory, config: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(config))
    holds(["estimate", "--model", str(folder), *JOB, "--tuning", "lora"])


@fuzz
@given(changed(TRAIN, ["fsdp_config", "gradient_checkpointing_kwargs", "vllm_mode", "dtype", "optim", "loss_type"]))
def test_any_train_config_is_answered_or_refused(
    tmp_path_factory: pytest.TempPathFactory, train: dict[str, Any]
) -> None:
    file = tmp_path_factory.mktemp("train") / "train.yaml"
    file.write_text(json.dumps(train))  # JSON is YAML
    holds(["estimate", *JOB, "--config", str(file)])


@fuzz
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["--max-length", "--batch-size", "--lora-r", "--risk", "--free-memory", "--gpus", "--set",
                             "--tuning", "--trl-version", "--effective-batch-size", "--host-memory"]),
            odd_values.map(str).filter(lambda text: "\x00" not in text),
        ),
        max_size=3,
    )
)  # fmt: skip
def test_any_arguments_are_answered_or_refused(pairs: list[tuple[str, str]]) -> None:
    holds(["estimate", *QWEN, *(word for pair in pairs for word in pair)])
