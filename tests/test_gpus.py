"""GPUs by name, by capacity and from the driver."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from planner.errors import InputError, UnknownName
from planner.gpus.catalogue import OTHER_VENDORS, _key, gpu_rows, load_gpu
from planner.gpus.local import DriverReading, _readings, _visible
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.models.catalogue import load_model
from planner.planning import plan
from planner.units import GIB

SPELLINGS = [
    json.loads(line)
    for line in (Path(__file__).parent / "data" / "gpu_spellings.jsonl").read_text(encoding="utf-8").splitlines()
]
A100_40G_BYTES = 42_402_064_629  # 39.49 GiB, the lowest total that torch reported


class TestCatalogue:
    def test_every_card_has_a_source_and_sane_figures(self) -> None:
        for row in gpu_rows():
            gpu = row.gpu
            assert gpu.source
            assert row.reported or row.derived
            assert 0.9 * row.marketing_gb * 1e9 < gpu.total_bytes < row.marketing_gb * GIB
            assert gpu.bf16_flops > 1e12
            assert gpu.memory_bytes_per_second > 1e11
            assert gpu.pcie_bytes_per_second > 1e10
            assert gpu.free_bytes == gpu.total_bytes - (row.host_bytes(1) if row.part == "unified" else 0)

    def test_there_are_at_least_129_cards_and_no_name_means_two_of_them(self) -> None:
        keys = [re.sub(r"[-_ ]", "", row.gpu.name.lower()) for row in gpu_rows()]
        assert len(keys) == len(set(keys)) >= 129

    def test_a_slice_is_a_part_of_its_card(self) -> None:
        slices = [row.gpu for row in gpu_rows() if row.part == "slice"]
        assert {gpu.name.partition("-MIG-")[0] for gpu in slices} == {
            "A100-40G",
            "A100-80G",
            "H100-SXM",
            "H200",
            "B200",
        }
        for gpu in slices:
            whole = load_gpu(gpu.name.partition("-MIG-")[0])
            assert gpu.total_bytes <= 0.51 * whole.total_bytes
            assert gpu.memory_bytes_per_second <= 0.5 * whole.memory_bytes_per_second
            assert gpu.bf16_flops / whole.bf16_flops == pytest.approx(
                gpu.multiprocessors / whole.multiprocessors, rel=1e-2
            )
            assert gpu.nvlink_bytes_per_second == 0

    def test_the_cpu_s_part_of_a_unified_memory_is_no_memory_of_the_gpu(self) -> None:
        cluster = parse_cluster("DGX-Spark")
        assert cluster.gpu.total_bytes == int(119.7 * GIB)
        assert cluster.gpu.free_bytes + cluster.host.total_bytes == cluster.gpu.total_bytes
        given = parse_cluster("DGX-Spark", host_memory="40GiB")
        assert given.gpu.free_bytes + 40 * GIB == cluster.gpu.total_bytes
        with pytest.raises(InputError, match=r"shares 119\.70 GiB with the CPU\. Give at most 119 GiB\.$"):
            parse_cluster("DGX-Spark", host_memory="200GiB")

    def test_every_name_and_alias_finds_its_own_card(self) -> None:
        for row in gpu_rows():
            for name in (row.gpu.name, *row.aliases):
                assert load_gpu(name) == row.gpu, name

    def test_an_a100_40g_is_what_torch_reports_and_not_40_billion_bytes(self) -> None:
        assert load_gpu("A100-40G").total_bytes == A100_40G_BYTES

    def test_where_several_were_seen_the_smallest_counts(self) -> None:
        assert load_gpu("T4").total_bytes == int(14.563 * GIB)
        assert load_gpu("H100").total_bytes == int(79.11 * GIB)

    def test_a_card_that_was_never_seen_is_flagged_and_no_larger_than_its_guess(self) -> None:
        row = next(row for row in gpu_rows() if row.gpu.name == "RTX-3080-10G")
        assert not row.reported
        assert row.gpu.total_bytes <= 9.77 * GIB

    def test_links_are_in_one_direction(self) -> None:
        assert load_gpu("A100-80G").nvlink_bytes_per_second == 300e9
        assert load_gpu("L4").nvlink_bytes_per_second == 0
        assert load_gpu("RTX-3090").nvlink_bytes_per_second == 0  # its NVLink bridge joins two cards only

    def test_a_t4_has_no_bf16(self) -> None:
        assert not load_gpu("T4").supports_bf16
        assert load_gpu("A100-40G").supports_bf16


class TestNames:
    @pytest.mark.parametrize(
        "name",
        [
            "A100-40G",
            "a100-40g",
            "A100_40GB",
            "A100 40GB",
            "NVIDIA A100-SXM4-40GB",
            "nvidia-a100-sxm4-40gb",
            "A100-SXM4-40GB",
        ],
    )
    def test_spelling_does_not_matter(self, name: str) -> None:
        assert load_gpu(name).name == "A100-40G"

    @pytest.mark.parametrize(
        ("name", "found"),
        [
            ("RTX-3050-4G", "RTX-3050-Laptop-4G"),
            ("NVIDIA GeForce RTX 3090", "RTX-3090"),
            ("rtx4090", "RTX-4090"),
            ("RTX-4090-24G", "RTX-4090"),
            ("Tesla T4", "T4"),
            ("H100", "H100-SXM"),
            ("H100-80GB", "H100-SXM"),
            ("L40S-48G", "L40S"),
        ],
    )
    def test_common_names_find_their_card(self, name: str, found: str) -> None:
        assert load_gpu(name).name == found

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("A100", "A100-40G"),
            ("V100", "V100-16G"),
            ("RTX-409", "RTX-4090"),
            ("RTX-9090", "RTX-5090"),
            ("X1", "plan gpus"),
        ],
    )
    def test_an_unknown_card_is_answered_with_the_nearest(self, name: str, message: str) -> None:
        with pytest.raises(UnknownName, match=message):
            load_gpu(name)

    @pytest.mark.parametrize(
        ("name", "vendor"),
        [
            ("MI300X", "AMD"),
            ("MI355X", "AMD"),
            ("mi325", "AMD"),
            ("AMD Instinct MI250X", "AMD"),
            ("Radeon PRO W7900", "AMD"),
            ("RX 7900 XTX", "AMD"),
            ("Gaudi3", "Intel"),
            ("Arc-Pro-B60", "Intel"),
            ("TPU v5e", "Google"),
            ("Trainium2", "AWS"),
            ("Ascend 910B", "Huawei"),
            ("M3 Max", "Apple"),
        ],
    )
    def test_an_accelerator_of_another_vendor_is_said_to_be_not_covered(self, name: str, vendor: str) -> None:
        with pytest.raises(UnknownName, match=rf"^Unknown GPU '{name}'\. {vendor} is not covered: ") as caught:
            load_gpu(name)
        assert "Did you mean" not in str(caught.value)

    def test_no_card_of_the_catalogue_looks_like_another_vendor_s(self) -> None:
        for row in gpu_rows():
            for name in (row.gpu.name, *row.aliases):
                assert not any(names.match(_key(name)) for names in OTHER_VENDORS.values()), name


class TestClusters:
    @pytest.mark.parametrize(
        ("text", "nodes", "per_node"),
        [
            ("A100-40G", 1, 1),
            ("2xA100-40G", 1, 2),
            ("2 x A100-40G", 1, 2),
            ("4x8xA100-40G", 4, 8),
            ("1X8XA100-40G", 1, 8),
        ],
    )
    def test_counts_are_nodes_times_gpus(self, text: str, nodes: int, per_node: int) -> None:
        cluster = parse_cluster(text)
        assert (cluster.nodes, cluster.gpus_per_node, cluster.num_gpus) == (nodes, per_node, nodes * per_node)
        assert cluster.gpu.name == "A100-40G"

    @pytest.mark.parametrize(
        ("text", "size"),
        [
            ("1x24GiB", 24 * GIB),
            ("24GiB", 24 * GIB),
            ("2x39.5 GiB", int(39.5 * GIB)),
            ("1x4096MiB", 4 * GIB),
            ("1x24GB", 24 * 10**9),
        ],
    )
    def test_a_bare_capacity_is_a_card_with_assumed_speeds(self, text: str, size: int) -> None:
        gpu = parse_cluster(text).gpu
        assert gpu.total_bytes == gpu.free_bytes == size
        assert "speeds assumed" in gpu.source
        assert gpu.supports_bf16

    def test_a_card_in_gigabytes_keeps_its_name(self) -> None:
        assert parse_cluster("1x24GB").gpu.name == "24GB"
        assert parse_cluster(f"1x{parse_cluster('1x24GB').gpu.name}") == parse_cluster("1x24GB")

    def test_assumed_speeds_are_no_faster_than_any_card_of_that_size(self) -> None:
        bare = parse_cluster("1x24GiB").gpu
        for name in ("RTX-3090", "A10G", "L4", "RTX-4090"):
            assert bare.bf16_flops <= load_gpu(name).bf16_flops
            assert bare.memory_bytes_per_second <= load_gpu(name).memory_bytes_per_second

    def test_a_partly_used_card_keeps_its_total(self) -> None:
        gpu = parse_cluster("A100-40G", "30GiB").gpu
        assert (gpu.total_bytes, gpu.free_bytes) == (A100_40G_BYTES, 30 * GIB)

    @pytest.mark.parametrize(
        ("text", "free_memory", "message"),
        [
            ("0xH100", None, r"^--gpus '0xH100' has 0 GPUs; at least one is needed\.$"),
            ("-2xH100", None, r"has -2 GPUs"),
            ("2x0xH100", None, r"has 0 GPUs"),
            ("", None, r"names no GPU"),
            ("1x24QB", None, r"Unknown GPU '24QB'"),
            ("9xGPU:8", None, r"Unknown GPU 'GPU:8'"),
            ("2xA100-40G-3g.20gb", None, r"has 2 MIG slices, between which NCCL does not communicate\. Write 1xA100"),
            ("8xMI300X", None, r"AMD is not covered"),
            ("1x0GiB", None, r"^A card of 0\.00 GiB does not exist\. Give from 1 GiB to 4,096 GiB\.$"),
            ("2x", None, r"names no GPU"),
            ("1x24", None, r"^--gpus '24' is no card\. A capacity needs its unit: 24GiB\.$"),
            (
                "64xH100",
                None,
                r"^--gpus '64xH100' puts 64 GPUs in one node\. Write nodes x GPUs, such as 8x8xH100\.$",
            ),
            ("99999x8xH100", None, r"has more than 4096 nodes"),
            ("A100-40G", "30", r"Did you mean 30GiB\?$"),
            ("A100-40G", "50GiB", r"^--free-memory 50GiB is not between 1 GiB and the 39\.49 GiB of A100-40G\.$"),
            ("A100-40G", "0", r"is not between"),
            ("A100-40G", "much", r"is not a size"),
        ],
    )
    def test_what_names_no_cluster_is_refused(self, text: str, free_memory: str | None, message: str) -> None:
        with pytest.raises(InputError, match=message):
            parse_cluster(text, free_memory)


def test_the_table_has_at_least_129_spellings() -> None:
    assert len({row["text"] for row in SPELLINGS}) == len(SPELLINGS) >= 129


@pytest.mark.parametrize("row", SPELLINGS, ids=[row["text"] for row in SPELLINGS])
def test_a_spelling_means_its_cluster(row: dict[str, object]) -> None:
    cluster = parse_cluster(str(row["text"]))
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu.name) == (row["nodes"], row["gpus"], row["name"])


class FakeNvmlError(Exception):
    pass


def fake_nvml(names: list[str]) -> SimpleNamespace:
    """A driver with 24 GiB cards, 0.4 GiB reserved, 20 GiB free on the first card and 1 GiB less on each next."""
    return SimpleNamespace(
        NVMLError=FakeNvmlError,
        nvmlMemory_v2=2,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(names),
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda index: names[index],
        nvmlDeviceGetCudaComputeCapability=lambda index: (8, 6),
        nvmlDeviceGetMemoryInfo=lambda index, version: SimpleNamespace(
            total=24 * GIB, reserved=GIB // 2, free=(20 - index) * GIB
        ),
    )


class TestLocal:
    @pytest.fixture(autouse=True)
    def all_visible(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def test_the_least_free_card_counts_for_all(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("planner.gpus.local._nvml", lambda: fake_nvml(["NVIDIA GeForce RTX 3090"] * 2))
        cluster = parse_cluster("local")
        assert (cluster.num_gpus, cluster.gpu.name) == (2, "RTX-3090")
        assert (cluster.gpu.total_bytes, cluster.gpu.free_bytes) == (24 * GIB - GIB // 2, 19 * GIB)
        assert cluster.gpu.bf16_flops == load_gpu("RTX-3090").bf16_flops

    def test_a_card_that_the_catalogue_lacks_keeps_its_name_and_has_assumed_speeds(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("planner.gpus.local._nvml", lambda: fake_nvml(["NVIDIA Brand New 1"]))
        gpu = parse_cluster("local").gpu
        assert gpu.name == "NVIDIA Brand New 1"
        assert "speeds assumed" in gpu.source
        assert gpu.compute_capability == (8, 6)

    def test_free_memory_wins_over_what_is_free(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("planner.gpus.local._nvml", lambda: fake_nvml(["NVIDIA GeForce RTX 3090"]))
        assert parse_cluster("local", "10GiB").gpu.free_bytes == 10 * GIB

    def test_the_main_memory_is_this_machine_s(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("planner.gpus.local._nvml", lambda: fake_nvml(["NVIDIA GeForce RTX 3090"]))
        monkeypatch.setattr("planner.gpus.host_memory.local_bytes", lambda: 23 * GIB)
        host = parse_cluster("local").host
        assert (host.total_bytes, host.origin) == (23 * GIB, "local")
        assert parse_cluster("local", None, "64GiB").host.total_bytes == 64 * GIB

    def test_different_cards_are_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("planner.gpus.local._nvml", lambda: fake_nvml(["Tesla T4", "NVIDIA L4"]))
        with pytest.raises(InputError, match=r"finds different cards \(NVIDIA L4, Tesla T4\)"):
            parse_cluster("local")

    def test_no_card_is_refused_with_what_to_do(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("planner.gpus.local._nvml", lambda: fake_nvml([]))
        with pytest.raises(InputError, match=r"finds no NVIDIA GPU here\. Name the card instead"):
            parse_cluster("local")

    @pytest.mark.parametrize(("listed", "count"), [("0", 1), ("1,0", 2), ("", 0), ("GPU-1234", 2)])
    def test_cuda_visible_devices_is_honoured(self, monkeypatch: pytest.MonkeyPatch, listed: str, count: int) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
        readings: list[DriverReading] = _readings(fake_nvml(["Tesla T4"] * 2))  # type: ignore[arg-type]
        assert len(_visible(readings)) == count


def test_names_are_looked_up_without_torch_or_transformers() -> None:
    program = (
        "import sys; from planner.models.catalogue import load_model; from planner.gpus.parse import parse_cluster; "
    )
    program += "load_model('Qwen2.5-7B'); parse_cluster('2xA100-40G'); "
    program += "heavy = ('torch', 'transformers', 'huggingface_hub', 'pynvml', 'pandas'); "
    program += "sys.exit(any(name in sys.modules for name in heavy))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(("text", "speed"), [("400Gb", 50e9), ("8x400Gb", 400e9), ("100 Gbps", 12.5e9)])
def test_a_network_is_read_in_gigabits_a_second(text: str, speed: float) -> None:
    assert parse_cluster("2x8xH100", network=text).network_bytes_per_second == speed


@pytest.mark.parametrize("text", ["400", "400GB", "0Gb", "999x999999Gb", "fast", "-1Gb"])
def test_no_network_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="gigabits a second: 400Gb, 8x400Gb"):
        parse_cluster("2x8xH100", network=text)


@pytest.mark.parametrize("gpus", ["1x24GiB", "H100-3g.40gb"])
def test_only_a_card_that_fits_into_a_node_again_is_proposed_in_larger_numbers(gpus: str) -> None:
    """A bare capacity and a slice have no nodes of eight of them."""
    job = Job(model=load_model("DeepSeek-V3"), method="sft", tuning="full")
    found = plan(job, parse_cluster(gpus))
    assert found.remedies
    cards = {str(remedy.change.values["card"]) for remedy in found.remedies if remedy.change.code == "whole_nodes"}
    assert cards == {"B200"}  # 80 GiB do not hold a layer's experts twice, as DeepSpeed gathers them
