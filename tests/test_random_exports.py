"""Random exports, read by the programs that they are written for."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_launch import CASES, candidate, parsed

from planner.candidate import Candidate
from planner.errors import InputError
from planner.files.write import write_files
from planner.launch.files import launch_files

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

CHANGES: dict[str, list[object]] = {
    "per_device_train_batch_size": [8, 16],  # multiples of each num_generations
    "gradient_accumulation_steps": [1, 8],
    "gradient_checkpointing": [True, False],
    "optim": ["adamw_torch", "adafactor", "paged_adamw_8bit", "sgd"],
    "attn_implementation": ["sdpa", "flash_attention_2"],
    "expandable_segments": [True, False],
}


def random_export(seed: int, folder: Path) -> Candidate:
    """Export a random candidate."""
    chosen = random.Random(seed)
    while True:
        method, _, settings = chosen.choice(CASES)
        extra = {name: chosen.choice(values) for name, values in CHANGES.items() if chosen.random() < 0.4}
        try:
            held = candidate(method, **{**extra, **settings})
            write_files(launch_files(held), folder, overwrite=False)
            return held
        except InputError:
            continue  # the settings contradict one another: nothing is written


def read_random_export(seed: int, folder: Path) -> None:
    """Let bash, TRL's parser, accelerate and DeepSpeed read a random export."""
    held = random_export(seed, folder)
    for script in folder.glob("*.sh"):
        subprocess.run(["bash", "-n", script], check=True)
    assert parsed(held, folder).per_device_train_batch_size == held.per_device_train_batch_size
    from accelerate.commands.config.config_args import load_config_from_file

    assert load_config_from_file(str(folder / "accelerate.yaml")).num_processes == held.num_processes
    if (folder / "deepspeed.json").exists():
        deepspeed_takes(folder / "deepspeed.json", held.num_processes)


def deepspeed_takes(path: Path, processes: int) -> None:
    """Read the file with DeepSpeed's own class, where Transformers has replaced "auto"."""
    import json

    from deepspeed.runtime.config import DeepSpeedConfig

    config = json.loads(path.read_text(encoding="utf-8"))
    numbers = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 1.0}
    filled = {name: value for name, value in config.items() if value != "auto"}
    filled |= numbers | {name: {"enabled": name == "bf16"} for name in ("bf16", "fp16")}
    assert DeepSpeedConfig(filled).zero_optimization_stage == config["zero_optimization"]["stage"]


@pytest.mark.parametrize("seed", range(20))
def test_every_reader_takes_a_random_export(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # the parser sets it, and the test takes it back
    read_random_export(seed, tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(20, 200))
def test_every_reader_takes_many_random_exports(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
    read_random_export(seed, tmp_path)


@pytest.mark.slow
def test_shellcheck_has_no_remark_on_200_random_exports(tmp_path: Path) -> None:
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shellcheck = shutil.which("shellcheck", path=beside)
    if shellcheck is None:
        pytest.skip("shellcheck is not installed")
    for seed in range(200):
        held = random_export(seed, tmp_path / str(seed))
        if held.row_gpus == held.dp_replicate_size == 1:
            write_files(launch_files(held, "torchrun"), tmp_path / f"{seed} torchrun", overwrite=False)
    done = subprocess.run([shellcheck, *tmp_path.glob("*/*.sh")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
