"""Probes on a Ray cluster of three nodes on this machine, with logical GPUs; killed nodes, workers and drivers."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest

pytest.importorskip("psutil")
pytest.importorskip("trl")
pytest.importorskip("optuna", minversion="5.0")
ray = pytest.importorskip("ray")

import psutil  # noqa: E402
import test_devices  # noqa: E402
from msgspec.structs import replace  # noqa: E402
from ray.cluster_utils import Cluster as RayCluster  # noqa: E402
from ray_probes import CLUSTER, answer, device_options, entries, proven  # noqa: E402

from planner.commands.exit_codes import EXIT_WRONG_INPUT  # noqa: E402
from planner.commands.main import run  # noqa: E402
from planner.errors import InputError  # noqa: E402
from planner.files.cache import temporary_prefix  # noqa: E402
from planner.gpus.cluster import Cluster  # noqa: E402
from planner.gpus.parse import parse_cluster  # noqa: E402
from planner.measurements.measurement import DeviceName, Measurement, Outcome  # noqa: E402
from planner.memory.optimizer import held_gradients, optimizer_states_bytes  # noqa: E402
from planner.memory.parameters.policy import policy_parameters  # noqa: E402
from planner.memory.weights import policy_weights_bytes  # noqa: E402
from planner.models.catalogue import load_model  # noqa: E402
from planner.quantities import CUDA_BLOCK_BYTES  # noqa: E402
from planner.schemes import Sharding  # noqa: E402
from probes.runner.devices import DeviceOptions, Probe, device  # noqa: E402
from probes.runner.ray_device import decisive, ray_device, refuse_other_releases, room  # noqa: E402
from probes.runner.runner import WorkerLimits  # noqa: E402
from probes.study.certificate import certificate_report  # noqa: E402

# The libraries' own warnings are not errors; Ray leaves sockets and processes to the interpreter's end.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

# Ray finds out in a second instead of 15 that a node is lost.
QUICK = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 300, "health_check_failure_threshold": 3}
NODE = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 80 * 2**20}
SCRIPT = Path(__file__).with_name("ray_probes.py")
SFT = replace(test_devices.SFT, model=load_model("Qwen2.5-0.5B"))


@pytest.fixture(scope="module")
def nodes() -> Iterator[RayCluster]:
    """The driver's node without GPUs, and two nodes with one GPU each."""
    set_environment = pytest.MonkeyPatch()
    set_environment.setenv(
        "PYTHONPATH", f"{SCRIPT.parents[1]}:{SCRIPT.parent}"
    )  # where nodes find what is not installed
    cluster = RayCluster(initialize_head=True, head_node_args={**NODE, "num_gpus": 0, "_system_config": QUICK})
    for _ in range(2):
        cluster.add_node(**NODE, num_gpus=1)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    set_environment.undo()


@pytest.fixture
def record(tmp_path: Path) -> Path:
    return tmp_path / "record"


def wait_until(true: Callable[[], Any], seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def nothing_stays(folder: Path) -> bool:
    """Return whether guards have removed the folders of killed probes, or the next probe would a day later.

    Ray may kill the process that reads a measurement when its guard has already ended.
    """
    for left in folder.glob("plan-probe-*"):
        os.utime(left, times=(0, 0))
    temporary_prefix("probe", str(folder))
    return not list(folder.glob("plan-probe-*"))


def storage(folder: Path) -> str:
    return f"sqlite:///{folder / 'study.db'}"


# -- no cluster --------------------------------------------------------------------------------------------------------


def test_an_address_without_a_cluster_is_one_line(record: Path) -> None:
    with pytest.raises(InputError, match=r"^--ray nowhere is no Ray cluster that can be joined \(.*ray start --head"):
        ray_device("cpu", CLUSTER, device_options(record, 0.0), "nowhere")


# -- the contract of every device --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["cpu"])
def name(request: pytest.FixtureRequest) -> DeviceName:
    found: DeviceName = request.param
    return found


@pytest.fixture(scope="module")
def opened(name: DeviceName, options: DeviceOptions, nodes: RayCluster) -> Callable[[Cluster], Probe]:
    return lambda cluster: ray_device(name, cluster, options, nodes.address)


options, measured = test_devices.options, test_devices.measured


@pytest.mark.nightly
class TestContract(test_devices.TestContract):
    """That of the local devices."""


# -- one node ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    folder = tmp_path_factory.mktemp("undisturbed")
    answer = proven("", storage(folder), folder / "record", seconds=0.0)
    assert (answer.ending, answer.probes > 2) == ("certified", True)
    return certificate_report(answer.certificate)


def test_the_answer_with_ray_is_the_answer_without(
    nodes: RayCluster, record: Path, undisturbed: dict[str, object]
) -> None:
    found = proven(nodes.address, storage(record.parent), record, seconds=0.0)
    assert certificate_report(found.certificate) == undisturbed


def test_there_is_room_for_as_many_probes_as_nodes_have_their_gpus(nodes: RayCluster, record: Path) -> None:
    ray_device("cpu", CLUSTER, device_options(record, 0.0), nodes.address)
    assert room(CLUSTER) == 2
    assert room(parse_cluster("2x1xA100-40G", None)) == 1
    assert room(parse_cluster("2xA100-40G", None)) == 0


def test_a_plan_for_more_gpus_than_a_node_has_names_what_it_has(nodes: RayCluster, record: Path) -> None:
    with pytest.raises(
        InputError,
        match=r"^The plan is for 1 node of 4 GPUs, the largest of the \d nodes of the Ray cluster has 1\. "
        r"Plan with --gpus 1xA100-40G\.$",
    ):
        ray_device("cpu", parse_cluster("4xA100-40G", None), device_options(record, 0.0), nodes.address)


def test_a_node_with_another_release_is_refused() -> None:
    versions = {"psutil": f"{psutil.__version__}+local", "cuda": "13.0"}
    refuse_other_releases(replace(answer(SFT), versions=versions))
    with pytest.raises(InputError, match=r"^A node of the Ray cluster has psutil 1\.0, this machine \S+\. Install one"):
        refuse_other_releases(replace(answer(SFT), versions={"psutil": "1.0"}))


def test_the_command_line_reaches_the_cluster(
    nodes: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PLAN_CACHE", str(tmp_path))
    job = ["--model", "Qwen2.5-0.5B", "--gpus", "2xA100-40G", "--method", "sft", "--probe", "--device", "cpu"]
    assert run([*job, "--ray", nodes.address]) == EXIT_WRONG_INPUT
    assert "Plan with --gpus 1xA100-40G." in capsys.readouterr().err


# -- several nodes -----------------------------------------------------------------------------------------------------

TWO = parse_cluster("2x1xA100-40G", None)
OVER_TWO = replace(test_devices.SFT, num_nodes=2, num_processes=2, sharding="ddp")


def real_options(folder: Path, **settings: Any) -> DeviceOptions:
    limits = WorkerLimits(seconds=300.0, grace_seconds=0.5, host_reserve_share=0.0, disk_reserve_bytes=0)
    folder.mkdir(exist_ok=True)
    return DeviceOptions(logs=folder / "logs", folder=str(folder), limits=limits, resume=False, save=False, **settings)


@pytest.mark.nightly
@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3", "fsdp2"])
def test_a_candidate_over_two_nodes_is_one_training_of_both(
    sharding: Sharding, nodes: RayCluster, tmp_path: Path
) -> None:
    candidate = replace(OVER_TWO, sharding=sharding)
    found = ray_device("cpu", TWO, real_options(tmp_path), nodes.address)(candidate)
    keeps_what_the_formulas_say(found, tmp_path)
    on_one = device("cpu", parse_cluster("2xA100-40G", None), real_options(tmp_path / "one"))
    alone = on_one(replace(candidate, num_nodes=1))
    assert [rank.state_bytes for rank in found.ranks] == [rank.state_bytes for rank in alone.ranks]


@pytest.mark.nightly
def test_hybrid_sharding_keeps_a_copy_of_the_model_on_each_of_two_nodes(nodes: RayCluster, tmp_path: Path) -> None:
    candidate = replace(OVER_TWO, num_processes=4, sharding="fsdp2", dp_replicate_size=2)
    pair = [nodes.add_node(**NODE, num_gpus=2) for _ in range(2)]
    try:
        cluster = parse_cluster("2x2xA100-40G", None)
        found = ray_device("cpu", cluster, real_options(tmp_path), nodes.address)(candidate)
    finally:
        for node in pair:
            nodes.remove_node(node)
    keeps_what_the_formulas_say(found, tmp_path)
    # float32 weights, divided among the two processes of a node
    assert {rank.state_bytes["weights"] for rank in found.ranks} == {4 * candidate.model.params // 2}


def keeps_what_the_formulas_say(found: Measurement, folder: Path) -> None:
    """Check the states of the heaviest rank, and that one launcher ran on each of two nodes."""
    candidate = found.candidate
    assert (found.outcome, found.message) == ("fits", "")
    assert [rank.rank for rank in found.ranks] == [*range(candidate.num_processes)]
    tensors = policy_parameters(candidate).base_tensors.count
    for component, formula, copies in (
        ("weights", policy_weights_bytes, 1),
        ("gradients", lambda held: held_gradients(held).at_step, 1),
        ("optimizer_states", optimizer_states_bytes, 2),
    ):
        heaviest = max(rank.state_bytes[component] for rank in found.ranks)
        # the formulas round every tensor up to the allocator's blocks
        assert 0 <= formula(candidate) - heaviest < copies * tensors * CUDA_BLOCK_BYTES, component
    logs = sorted(path.name.rpartition("-")[2] for path in (folder / "logs").glob("*.json"))
    assert len(logs) == 2
    assert not list(folder.glob("plan-probe-*"))


@pytest.mark.nightly
def test_a_shortage_on_one_of_two_nodes_decides_for_both(nodes: RayCluster, tmp_path: Path) -> None:
    small = replace(TWO, gpu=replace(TWO.gpu, free_bytes=test_devices.TOO_SMALL_BYTES))
    found = ray_device("cpu", small, real_options(tmp_path), nodes.address)(OVER_TWO)
    assert found.outcome == "out_of_memory"
    assert found.shortage is not None


def test_a_server_on_a_node_of_its_own_is_said_not_to_be_probed(nodes: RayCluster, tmp_path: Path) -> None:
    candidate = replace(
        OVER_TWO, method="grpo", vllm="server", vllm_tensor_parallel_size=1, num_processes=1, sharding="none"
    )
    found = ray_device("cpu", TWO, real_options(tmp_path), nodes.address)(candidate)
    assert (found.outcome, found.decided) == ("crashed", False)
    assert found.message.startswith("A vLLM server on a node of its own is not probed")


def test_a_shortage_decides_then_what_a_node_found_itself() -> None:
    fits = answer(SFT)
    ends = {name: replace(fits, outcome=name) for name in get_args(Outcome)}
    assert decisive([fits, fits]) is fits
    assert decisive([ends["crashed"], fits]) is ends["crashed"]
    assert decisive([ends["crashed"], ends["out_of_memory"]]) is ends["out_of_memory"]
    assert decisive([ends["crashed"], ends["host_out_of_memory"], ends["killed"]]) is ends["host_out_of_memory"]


# -- faults ------------------------------------------------------------------------------------------------------------


def probing(nodes: RayCluster, record: Path, seconds: float) -> tuple[threading.Thread, list[Measurement]]:
    """A probe that has started, and the list that its measurement will be in."""
    found: list[Measurement] = []
    probe = ray_device("cpu", CLUSTER, device_options(record, seconds), nodes.address)
    thread = threading.Thread(target=lambda: found.append(probe(SFT)), daemon=True)
    thread.start()
    wait_until(lambda: entries(record, "start"))
    return thread, found


def ancestor(process: int, name: str) -> psutil.Process:
    return next(each for each in psutil.Process(process).parents() if each.name().startswith(name))


def kill_worker(process: int) -> None:
    ancestor(process, "ray::").kill()


def kill_raylet(process: int) -> None:
    ancestor(process, "raylet").kill()


def kill_node(process: int) -> None:
    """Kill all processes at once, as a loss of power."""
    raylet = ancestor(process, "raylet")
    for each in (*raylet.children(recursive=True), raylet):
        each.kill()


@pytest.mark.nightly
@pytest.mark.parametrize("kill", [kill_worker, kill_node])
def test_a_probe_whose_worker_or_node_is_killed_runs_again(
    kill: Callable[[int], None], nodes: RayCluster, record: Path
) -> None:
    thread, found = probing(nodes, record, 2.0)
    ((_, process),) = entries(record, "start")
    kill(process)
    thread.join(60.0)
    if kill is kill_node:
        nodes.add_node(**NODE, num_gpus=1)
    assert [each.outcome for each in found] == [answer(SFT).outcome] == ["fits"]
    assert (len(entries(record, "start")), len(entries(record, "end"))) == (2, 1)
    assert not psutil.pid_exists(process)


@pytest.mark.nightly
def test_a_probe_whose_raylet_is_killed_is_measured_once_and_leaves_nothing(nodes: RayCluster, record: Path) -> None:
    thread, found = probing(nodes, record, 4.0)
    ((_, process), *_) = entries(record, "start")
    kill_raylet(process)
    thread.join(60.0)
    nodes.add_node(**NODE, num_gpus=1)
    assert [each.outcome for each in found] == ["fits"]
    assert len(entries(record, "end")) == 1
    wait_until(lambda: not any(psutil.pid_exists(each) for _, each in entries(record, "start")))


@pytest.mark.nightly  # 10 s; a probe over two nodes below loses one too
def test_a_study_that_loses_a_node_measures_nothing_twice(
    nodes: RayCluster, record: Path, undisturbed: dict[str, object]
) -> None:
    def kill() -> None:
        wait_until(lambda: len(entries(record, "end")) >= 1 and len(entries(record, "start")) >= 3)
        kill_node(entries(record, "start")[-1][1])

    killer = threading.Thread(target=kill)
    killer.start()
    found = proven(nodes.address, storage(record.parent), record, at_a_time=2, seconds=1.0)
    killer.join()
    nodes.add_node(**NODE, num_gpus=1)
    assert certificate_report(found.certificate)["best"] == undisturbed["best"]
    ended = [name for name, _ in entries(record, "end")]
    assert len(set(ended)) == len(ended) == found.probes
    assert found.certificate.holds


def test_a_study_whose_driver_is_killed_goes_on_and_measures_nothing_twice(
    nodes: RayCluster, record: Path, undisturbed: dict[str, object]
) -> None:
    driver = subprocess.Popen(
        [sys.executable, str(SCRIPT), "study", nodes.address, storage(record.parent), str(record), "2"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until(lambda: len(entries(record, "start")) >= 2)  # a busy machine looks too late to see exactly two
    driver.kill()
    driver.wait()
    wait_until(lambda: not psutil.pid_exists(entries(record, "start")[-1][1]))
    wait_until(lambda: nothing_stays(record.parent))
    # A probe in flight may end before Ray notices the death; nobody is left to store its result.
    unstored = [name for name, _ in entries(record, "end")]
    found = proven(nodes.address, storage(record.parent), record, seconds=0.0)
    assert certificate_report(found.certificate) == undisturbed
    ended = [name for name, _ in entries(record, "end")][len(unstored) :]
    assert len(set(ended)) == len(ended)


@pytest.mark.parametrize("kill", [kill_worker, pytest.param(kill_node, marks=pytest.mark.nightly)])
def test_a_probe_over_two_nodes_that_loses_one_runs_again_on_both(
    kill: Callable[[int], None], nodes: RayCluster, record: Path
) -> None:
    found: list[Measurement] = []
    probe = ray_device("cpu", TWO, device_options(record, 3.0), nodes.address)
    thread = threading.Thread(target=lambda: found.append(probe(OVER_TWO)), daemon=True)
    thread.start()
    wait_until(lambda: len(entries(record, "start")) == 2)
    first = entries(record, "start")
    kill(first[0][1])
    if kill is kill_node:
        nodes.add_node(**NODE, num_gpus=1)
    thread.join(90.0)
    assert [each.outcome for each in found] == ["fits"]
    again = entries(record, "start")[2:]
    assert len(again) == 2
    assert {process for _, process in again} <= {process for _, process in entries(record, "end")}
    wait_until(lambda: not any(psutil.pid_exists(process) for _, process in first))
    if kill is kill_worker:  # a node that lost its power does not remove its folder
        wait_until(lambda: nothing_stays(record.parent))
