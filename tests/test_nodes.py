"""Trainings on two nodes: slurm.sh of `plan export` itself, its two launchers on loopback, gloo between processes.

SLURM's programs are two scripts here: `scontrol` says that both nodes are this machine, `srun` starts the launcher of
each. Every rank's states equal the formulas, to the byte.
"""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from test_exported_runs import ROWS, tiny_model
from test_sharded_runs import CONFIG, Rank

from planner.candidate import Candidate
from planner.commands.main import app
from planner.launch.trl_config import Launcher
from planner.memory.optimizer import held_gradients, optimizer_states_bytes
from planner.memory.parameters.tensors import rounded_bytes
from planner.memory.weights import policy_weights_bytes
from planner.requests.saved_report import read_run
from planner.training_stack import complete_models

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
pytestmark = pytest.mark.nightly  # 20 to 60 s each

PLAN = typer.main.get_command(app).main
TESTS = Path(__file__).parent
LIMIT_SECONDS = 300
PORT = "29500"  # of slurm.sh
SRUN = f"""#!{sys.executable}
import os, subprocess, sys
words = sys.argv[1:]
count = int(next(word for word in words if word.startswith("--ntasks=")).partition("=")[2])
while words[0].startswith("--"):
    words.pop(0)
tasks = [subprocess.Popen(words, env={{**os.environ, "SLURM_PROCID": str(task)}}) for task in range(count)]
sys.exit(max(abs(task.wait()) for task in tasks))
"""
SCONTROL = "#!/bin/sh\necho 127.0.0.1\necho 127.0.0.1\n"

# Name -> GPUs and settings.
RUNS: dict[str, tuple[str, dict[str, object]]] = {
    "ddp": ("2x1xL4", {"distributed_type": "MULTI_GPU"}),
    "zero2": ("2x1xL4", {"distributed_type": "DEEPSPEED", "zero_stage": 2}),
    "zero3": ("2x1xL4", {"distributed_type": "DEEPSPEED", "zero_stage": 3}),
    "fsdp2": ("2x1xL4", {"distributed_type": "FSDP"}),
    "hsdp": ("2x2xL4", {"distributed_type": "FSDP", "dp_replicate_size": 2}),
}
CASES = [(name, "accelerate") for name in RUNS] + [(name, "torchrun") for name in RUNS if name != "hsdp"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), {**CONFIG, "dtype": "bfloat16"})


def exported(model: Path, name: str, launcher: Launcher, folder: Path) -> tuple[Candidate, Path]:
    """The candidate and the folder of `plan export`, completed as its README.md says."""
    gpus, settings = RUNS[name]
    saved, run, data = folder / "plan.json", folder / "run", folder / "data"
    data.mkdir()
    (data / "train.jsonl").write_text(f"{json.dumps(ROWS['sft'][0])}\n" * 16, encoding="utf-8")
    pinned = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    job = ["--model", str(model), "--method", "sft", "--tuning", "full", "--gpus", gpus, "--batch-size", "4", *pinned]
    assert PLAN(["estimate", *job, "--quiet", "--out", str(saved)], standalone_mode=False) == 0
    assert PLAN(["export", str(saved), str(run), "--launcher", launcher], standalone_mode=False) == 0
    train = run / "train.yaml"
    text = train.read_text(encoding="utf-8").replace("your-organisation/your-dataset", str(data))
    own = {"max_steps": 2, "save_strategy": "no", "report_to": "none"}
    # With use_cpu, transformers does not name DeepSpeed to the process group (5.23, training_args.py:1876): ZeRO-3 then
    # takes the world for one process. Without it, `trl` refuses bf16 before it starts the processes.
    if (name, launcher) != ("zero3", "torchrun"):
        own["use_cpu"] = True
    train.write_text(text + "".join(f"{key}: {json.dumps(value)}\n" for key, value in own.items()), encoding="utf-8")
    return read_run(saved, complete_models(print)).candidate, run


def started(run: Path, candidate: Candidate) -> tuple[tuple[int, Rank], ...]:
    """Start slurm.sh and return each rank's node and storages."""
    folder = run.parent
    programs, records = folder / "bin", folder / "records"
    programs.mkdir()
    records.mkdir()
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (programs / name).write_text(text, encoding="utf-8")
        (programs / name).chmod(0o755)
    script = run / "slurm.sh"
    with socket.socket() as free:  # another job of this machine may have the port
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    script.write_text(script.read_text(encoding="utf-8").replace(PORT, port), encoding="utf-8")
    settings = {
        "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(TESTS / "recorded"), str(TESTS), str(TESTS.parent)]),
        "SLURM_SUBMIT_DIR": str(run), "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_ID": "7",
        "SLURM_CPUS_ON_NODE": str(os.cpu_count()),
        "RECORD_FOLDER": str(records), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    if not candidate.scheme_row.whole:
        settings["RECORD_SHARDED"] = "1"
    log = folder / "log"
    with log.open("w") as sink:
        job = subprocess.Popen(
            ["bash", script], env=os.environ | settings, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = job.wait(LIMIT_SECONDS)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    assert code == 0, log.read_text()[-6000:]
    found = [json.loads((records / f"{rank}.json").read_text()) for rank in range(candidate.num_processes)]
    return tuple((record["node"], Rank(parts=record["parts"])) for record in found)


@pytest.mark.parametrize(("name", "launcher"), CASES)
def test_every_rank_of_two_nodes_keeps_what_the_formulas_say(
    name: str, launcher: Launcher, model: Path, tmp_path: Path
) -> None:
    candidate, run = exported(model, name, launcher, tmp_path)
    nodes, ranks = zip(*started(run, candidate), strict=True)
    assert nodes == tuple(rank * 2 // candidate.num_processes for rank in range(candidate.num_processes))
    for rank in ranks:
        assert rank.held_bytes("trained", "frozen") == policy_weights_bytes(candidate)
    # The heaviest rank: FSDP2's last shards are smaller, and optimizer states are not padded.
    assert max(rank.held_bytes("optimizer_states") for rank in ranks) == optimizer_states_bytes(candidate)
    one_buffer = candidate.sharding in ("fsdp2", "zero3")
    gradients = [
        rounded_bytes(sum(rank.parts["gradients"])) if one_buffer else rank.held_bytes("gradients") for rank in ranks
    ]
    assert max(gradients) == held_gradients(candidate).at_step
