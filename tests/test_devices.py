"""The contract of every device: candidate in, a measurement of the same kind out; and each device's own rules."""

import json
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("psutil")
pytest.importorskip("trl")

from msgspec.structs import replace
from script_workers import script

from planner.candidate import Candidate
from planner.errors import InputError
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.measurements.documents import measurement_line, measurement_of
from planner.measurements.measurement import EVIDENCE, DeviceName, Measurement
from planner.models.catalogue import load_model
from planner.units import GIB, MIB
from probes.runner.devices import DeviceOptions, Probe, capacity_limit_bytes, device
from probes.runner.gpus_in_use import Card
from probes.runner.runner import WorkerLimits

# The libraries' own deprecations are not errors; those of our code are.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

CLUSTER = parse_cluster("1xA100-40G", None)
MODEL = load_model(str(Path(__file__).parent / "models" / "tiny-qwen2"))
SFT = Candidate(model=MODEL, method="sft", max_length=64, per_device_train_batch_size=2, dtype="bfloat16")
TOO_SMALL_BYTES = 100 * 1024  # the model's weights alone are twice as much


def with_cards_of(card_bytes: int) -> Cluster:
    return replace(CLUSTER, gpu=replace(CLUSTER.gpu, free_bytes=card_bytes))


def has_gpu() -> bool:
    try:
        import torch
    except ImportError:  # PyTorch's CUDA build without NVIDIA's libraries
        return False
    return bool(torch.cuda.is_available())


def has_cuda_build() -> bool:
    """Return whether this is an environment for emulated GPUs; there PyTorch can be imported in a worker only."""
    torch = find_spec("torch")
    return torch is not None and Path(str(torch.origin)).with_name("lib").joinpath("libtorch_cuda.so").exists()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.slow),
        pytest.param("emulated", marks=pytest.mark.slow),
    ],
)
def name(request: pytest.FixtureRequest) -> DeviceName:
    if request.param == "cuda" and not has_gpu():
        pytest.skip("no GPU")
    if request.param == "emulated" and not has_cuda_build():
        pytest.skip("needs PyTorch's CUDA build: make emulated")
    found: DeviceName = request.param
    return found


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> DeviceOptions:
    return DeviceOptions(
        logs=tmp_path_factory.mktemp("logs"),
        limits=WorkerLimits(host_reserve_share=0.0, disk_reserve_bytes=0),
        resume=False,
        save=False,
    )


@pytest.fixture(scope="module")
def opened(name: DeviceName, options: DeviceOptions) -> Callable[[Cluster], Probe]:
    """Opens the device with the GPUs of a cluster."""
    return lambda cluster: device(name, cluster, options)


@pytest.fixture(scope="module")
def measured(opened: Callable[[Cluster], Probe]) -> Callable[[], Measurement]:
    """The measurement of a candidate that fits, taken once for all tests of a device."""
    probe = opened(CLUSTER)
    return cache(lambda: probe(SFT))


class TestContract:
    def test_a_candidate_that_fits_is_measured_phase_by_phase(self, measured: Callable[[], Measurement]) -> None:
        (rank,) = measured().ranks
        names = [phase.name for phase in rank.phases]
        assert (measured().outcome, measured().shortage, measured().message) == ("fits", None, "")
        assert {"forward", "backward", "optimizer_step"} <= set(names)
        assert len(names) == len(set(names))
        assert all(phase.allocated_bytes > 0 for phase in rank.phases)
        assert rank.peak_phase in names
        assert 0 < rank.peak_bytes <= rank.capacity_bytes

    def test_states_are_the_bytes_of_their_tensors(self, measured: Callable[[], Measurement]) -> None:
        """Two bytes a parameter for the weights and twice as many for the optimizer, up to blocks and scalars."""
        states = measured().ranks[0].state_bytes
        assert 2 * MODEL.params <= states["weights"] <= 2 * MODEL.params + 64 * 1024
        assert 2 * states["weights"] <= states["optimizer_states"] + 64 * 1024 <= 2 * states["weights"] + 128 * 1024

    @pytest.mark.nightly
    def test_the_same_candidate_needs_the_same_bytes_again(
        self, opened: Callable[[Cluster], Probe], measured: Callable[[], Measurement]
    ) -> None:
        again = opened(CLUSTER)(SFT)
        assert [replace(phase, seconds=0.0) for phase in again.ranks[0].phases] == [
            replace(phase, seconds=0.0) for phase in measured().ranks[0].phases
        ]
        assert again.ranks[0].state_bytes == measured().ranks[0].state_bytes

    def test_it_says_on_which_rung_it_stands(self, name: DeviceName, measured: Callable[[], Measurement]) -> None:
        assert (measured().device, measured().evidence) == (name, EVIDENCE[name])
        assert {"torch", "transformers", "trl"} <= measured().versions.keys()

    def test_it_measured_the_candidate_that_it_was_given(self, measured: Callable[[], Measurement]) -> None:
        assert measured().candidate == SFT

    def test_it_goes_through_json_and_back(self, measured: Callable[[], Measurement]) -> None:
        read = measurement_of(json.loads(measurement_line(measured())))
        assert replace(read, candidate=SFT) == measured()

    def test_a_card_that_is_too_small_runs_out_of_memory(
        self, name: DeviceName, opened: Callable[[Cluster], Probe]
    ) -> None:
        short = opened(with_cards_of(TOO_SMALL_BYTES))(SFT)
        assert (short.outcome, short.decided, short.evidence) == ("out_of_memory", True, EVIDENCE[name])
        assert short.shortage is not None
        assert short.shortage.phase == "load"
        assert short.shortage.over_bytes > 0
        assert short.shortage.free_bytes <= TOO_SMALL_BYTES
        assert short.step_seconds == 0.0
        assert short.message

    def test_what_a_device_does_not_have_is_nothing(
        self, name: DeviceName, measured: Callable[[], Measurement]
    ) -> None:
        (rank,) = measured().ranks
        assert bool(rank.driver_bytes) == (name in ("cuda", "emulated"))
        assert bool(rank.reserved_bytes) == (name in ("cuda", "emulated"))
        assert bool(measured().step_seconds) == (name in ("cuda", "cpu"))
        assert bool(measured().tokens_per_second) == bool(measured().step_seconds)


# -- cuda and cpu ------------------------------------------------------------------------------------------------------


def card(total_bytes: int) -> Card:
    return Card(index=0, total_bytes=total_bytes, free_bytes=total_bytes, holders=())


def test_a_worker_keeps_to_the_plans_card_on_a_larger_one() -> None:
    wanted = CLUSTER.gpu.free_bytes
    assert capacity_limit_bytes(CLUSTER, (card(wanted),)) == 0
    assert capacity_limit_bytes(CLUSTER, (card(wanted - 4 * MIB),)) == 0
    assert capacity_limit_bytes(CLUSTER, (card(80 * GIB),)) == wanted


def test_too_small_and_too_few_gpus_are_refused() -> None:
    with pytest.raises(
        InputError,
        match=r"The plan is for GPUs with 39\.\d\d GiB, GPU 0 of this machine has 24\.00 GiB\. "
        r"Plan with --gpus local\.",
    ):
        capacity_limit_bytes(CLUSTER, (card(24 * GIB),))
    with pytest.raises(InputError, match=r"The plan is for 1 GPUs, this machine shows 0\. Plan with --gpus local\."):
        capacity_limit_bytes(CLUSTER, ())


@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
def test_without_a_driver_the_devices_that_need_none_are_named() -> None:
    with pytest.raises(
        InputError, match=r"--device cuda needs an NVIDIA driver of 510 or newer, .*--device cpu for a small model"
    ):
        device("cuda", CLUSTER, DeviceOptions(logs=Path()))


@pytest.mark.parametrize("name", ["cuda", "cpu"])
def test_several_nodes_are_refused(name: DeviceName) -> None:
    with pytest.raises(
        InputError,
        match=r"A probe runs on one machine, the cluster has 2\. .*--ray auto, or one with --gpus 8xA100-40G\.$",
    ):
        device(name, parse_cluster("2x8xA100-40G", None), DeviceOptions(logs=Path()))


@pytest.mark.slow
@pytest.mark.nightly  # 13 s; tests/test_sharded_runs.py has these bytes, and emulated probes start two processes
def test_fsdp2_shards_float32_weights_and_two_states_on_the_cpu_too(tmp_path: Path) -> None:
    options = DeviceOptions(
        logs=tmp_path, limits=WorkerLimits(host_reserve_share=0.0, disk_reserve_bytes=0), resume=False, save=False
    )
    found = device("cpu", CLUSTER, options)(replace(SFT, sharding="fsdp2", num_processes=2))
    assert (found.outcome, found.message) == ("fits", "")
    for rank in found.ranks:
        assert rank.state_bytes["weights"] == 4 * MODEL.params // 2
        assert rank.state_bytes["optimizer_states"] == 2 * rank.state_bytes["weights"]


def test_on_larger_cards_a_worker_is_told_of_what_an_engine_takes_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probes.runner.devices.visible_cards", lambda count: (card(80 * GIB),) * count)
    text = "import json; told = json.load(open(task_file)); print(told['capacity_bytes'], told['card_bytes'])"
    cluster = with_cards_of(40 * GIB)
    found = device(
        "cuda", cluster, DeviceOptions(logs=tmp_path, limits=WorkerLimits(host_reserve_share=0.0), command=script(text))
    )(SFT)
    assert Path(found.log).with_suffix(".out").read_text().split() == [
        str(cluster.gpu.free_bytes),
        str(cluster.gpu.total_bytes),
    ]


def test_a_device_gives_its_options_to_the_worker(tmp_path: Path) -> None:
    text = (
        "import json; task = json.load(open(task_file)); "
        "print({name: task[name] for name in sorted(task) if name not in ('candidate', 'folder')})"
    )
    options = DeviceOptions(
        logs=tmp_path, limits=WorkerLimits(host_reserve_share=0.0), steps=3, evaluate=True, seed=7, command=script(text)
    )
    found = device("cpu", with_cards_of(GIB), options)(SFT)
    assert Path(found.log).with_suffix(".out").read_text().strip() == str({
        "capacity_bytes": GIB, "card_bytes": 0, "device": "cpu", "evaluate": True, "from_checkpoint": "",
        "one_of_many": False, "rendezvous": None, "resume": True, "save": True, "seed": 7, "steps": 3,
        "weights": "random",
    })  # fmt: skip
