"""Real ZeRO and FSDP2: a TRL trainer in two or four CPU processes over gloo, started by our launch files.

Every rank's states equal the formulas, to the byte. Bytes are those of a GPU: each storage is rounded up to the blocks
of the CUDA allocator.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec import Struct

from planner.candidate import Candidate
from planner.files.write import write_files
from planner.launch.command import launch_command
from planner.launch.files import launch_files
from planner.measurements.documents import candidate_report
from planner.memory.communication import communication_bytes, nccl_bytes
from planner.memory.optimizer import held_gradients, optimizer_states_bytes
from planner.memory.parameters.tensors import rounded_bytes
from planner.memory.weights import adapters_bytes, policy_weights_bytes
from planner.models.from_config import shape_of

pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
pytestmark = pytest.mark.slow  # the module's fixture takes 20 s

ROOT = Path(__file__).parent.parent
WORKER = ROOT / "tests" / "sharded_worker.py"
LIMIT_SECONDS = 300  # for the whole set, which takes 40 s on two busy cores

# Odd sizes, so that nothing divides by chance; matrices above and below ZeRO-3's threshold of 10 hidden_size elements.
CONFIG: dict[str, object] = {
    "model_type": "qwen2", "hidden_size": 56, "intermediate_size": 177, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 643, "tie_word_embeddings": False,
    "max_position_embeddings": 1024,
}  # fmt: skip
MODEL = shape_of(CONFIG, id="tiny", dtype="float32")


def candidate(**settings: object) -> Candidate:
    return Candidate(
        **{
            "model": MODEL,
            "method": "sft",
            "num_processes": 2,
            "per_device_train_batch_size": 2,
            "max_length": 32,
            "dtype": "bfloat16",
            **settings,
        }
    )  # type: ignore[arg-type]


CANDIDATES: dict[str, Candidate] = {
    "zero2": candidate(sharding="zero2"),
    "zero2 lora": candidate(sharding="zero2", tuning="lora"),
    "zero2 accumulating": candidate(sharding="zero2", gradient_accumulation_steps=2, dtype="float32"),
    "zero1 accumulating": candidate(sharding="zero1", gradient_accumulation_steps=2),
    "zero3": candidate(sharding="zero3"),
    "zero3 sizes": candidate(
        sharding="zero3",
        reduce_bucket_size=50_000,
        stage3_param_persistence_threshold=4000,
        stage3_prefetch_bucket_size=5000,
        stage3_max_live_parameters=50_000,
        stage3_max_reuse_distance=30_000,
    ),
    "zero3 lora": candidate(sharding="zero3", tuning="lora", gradient_accumulation_steps=2),
    "fsdp2": candidate(sharding="fsdp2"),
    "fsdp2 hybrid": candidate(sharding="fsdp2", num_processes=4, dp_replicate_size=2),
    "fsdp2 lora": candidate(sharding="fsdp2", tuning="lora"),
    "fsdp2 qlora": candidate(sharding="fsdp2", tuning="lora", quantization="nf4", bnb_4bit_quant_storage="bfloat16"),
    "fsdp2 float32": candidate(sharding="fsdp2", precision="no", dtype="float32", gradient_accumulation_steps=2),
}
NIGHTLY = frozenset({"zero1 accumulating", "fsdp2 hybrid", "fsdp2 float32"})  # CI runs one of each kind
each = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly if name in NIGHTLY else ()) for name in CANDIDATES]
)


class Rank(Struct, frozen=True, kw_only=True):
    """The bytes of the storages that one process kept, by part."""

    parts: dict[str, list[int]]

    def held_bytes(self, *names: str) -> int:
        return sum(rounded_bytes(size) for name in names for size in self.parts[name])


def environment(held: Candidate, folder: Path) -> dict[str, str]:
    """The environment variables that `accelerate launch` sets after it has read our file."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    with inside(folder):
        arguments = launch_command_parser().parse_args([*launch_command(held, str(WORKER))[2:]])
        arguments, defaults, from_file = _validate_launch_command(arguments)
        if arguments.use_deepspeed:
            arguments.deepspeed_fields_from_accelerate_config = ",".join(
                [*defaults.deepspeed_config, *(["mixed_precision"] if from_file else [])]
            )
            told = prepare_deepspeed_cmd_env(arguments)[1]
        else:
            told = prepare_multi_gpu_env(arguments)
    told["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(folder / "deepspeed.json")  # the processes run elsewhere
    return {name: value for name, value in told.items() if os.environ.get(name) != value}


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def finished(command: list[str], folder: Path, settings: dict[str, str]) -> str:
    """Run a command in a process group of its own, which ends with it; return its output."""
    log = folder / "log"
    told = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **settings}
    with log.open("w") as sink:
        started = subprocess.Popen(
            command, cwd=folder, env=told, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code = started.wait(LIMIT_SECONDS)
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
    said = log.read_text()
    assert code == 0, said
    return said


def ranks_of(name: str, folder: Path) -> tuple[Rank, ...]:
    ranks = range(CANDIDATES[name].num_processes)
    return tuple(Rank(parts=json.loads((folder / f"{name}.{rank}.json").read_text())) for rank in ranks)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Rank, ...]]:
    """Run every candidate of the selected tests once, all with one import of the libraries."""
    selected = {
        item.callspec.params["name"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    } | {"zero2"}  # which TestTheCommand starts once more
    folder = tmp_path_factory.mktemp("sharded")
    cases = []
    for name in selected:
        held = CANDIDATES[name]
        write_files(launch_files(held), folder / name, overwrite=False)
        cases.append(
            {"name": name, "candidate": candidate_report(held), "environment": environment(held, folder / name)}
        )
    (folder / "cases.json").write_text(json.dumps(cases))
    finished([sys.executable, str(WORKER), "cases.json", str(folder)], folder, {})
    return {name: ranks_of(name, folder) for name in selected}


class TestEveryRankKeepsWhatTheFormulasSay:
    @each
    def test_weights(self, name: str, runs: dict[str, tuple[Rank, ...]]) -> None:
        for rank in runs[name]:
            assert rank.held_bytes("trained", "frozen") == policy_weights_bytes(CANDIDATES[name]) + adapters_bytes(
                CANDIDATES[name]
            )

    @each
    def test_optimizer_states(self, name: str, runs: dict[str, tuple[Rank, ...]]) -> None:
        """The heaviest rank: FSDP2's last shards are smaller, and optimizer states are not padded."""
        assert max(rank.held_bytes("optimizer_states") for rank in runs[name]) == optimizer_states_bytes(
            CANDIDATES[name]
        )

    @each
    def test_gradients_when_the_optimizer_steps(self, name: str, runs: dict[str, tuple[Rank, ...]]) -> None:
        """FSDP2 has one buffer a layer, which the formula rounds as one."""
        measured = [rounded_bytes(sum(rank.parts["gradients"])) for rank in runs[name]]
        assert max(measured) == held_gradients(CANDIDATES[name]).at_step

    @pytest.mark.parametrize("name", [name for name in CANDIDATES if name.startswith("zero2")])
    def test_gradients_when_the_backward_pass_ends(self, name: str, runs: dict[str, tuple[Rank, ...]]) -> None:
        """The formula leaves out the last gradient, the embedding's, which is not yet reduced."""
        last = 0 if CANDIDATES[name].tuning == "lora" else rounded_bytes(2 * 643 * 56)
        measured = [rank.held_bytes("gradients_in_backward") - last for rank in runs[name]]
        assert max(measured) == held_gradients(CANDIDATES[name]).after_backward

    @pytest.mark.parametrize("name", ["zero3", "zero3 sizes", "zero3 lora"])
    def test_the_bucket_that_zero_3_keeps(self, name: str, runs: dict[str, tuple[Rank, ...]]) -> None:
        for rank in runs[name]:
            assert rank.held_bytes("buckets") == rounded_bytes(
                communication_bytes(CANDIDATES[name]) - nccl_bytes(CANDIDATES[name])
            )

    @each
    def test_nothing_else_stays(self, name: str, runs: dict[str, tuple[Rank, ...]]) -> None:
        for rank in runs[name]:
            assert rank.parts["others"] == []


@pytest.mark.nightly  # 30 s; tests/test_exported_runs.py starts launch.sh, and the runs above read our files
class TestTheCommand:
    def test_accelerate_launch_starts_it_with_our_files(
        self, runs: dict[str, tuple[Rank, ...]], tmp_path: Path
    ) -> None:
        held = CANDIDATES["zero2"]
        write_files(launch_files(held), tmp_path, overwrite=False)
        (tmp_path / "cases.json").write_text(json.dumps([{"name": "zero2", "candidate": candidate_report(held)}]))
        command = launch_command(
            held, str(WORKER), (sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0")
        )
        finished([*command, "cases.json", str(tmp_path)], tmp_path, {})
        assert [rank.parts for rank in ranks_of("zero2", tmp_path)] == [rank.parts for rank in runs["zero2"]]
