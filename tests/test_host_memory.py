"""Host memory of a node: what it is taken to be, and that a plan keeps within it."""

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from planner.cache_keys import state_settings, training_settings
from planner.candidate import Candidate
from planner.commands.exit_codes import EXIT_NOTHING_FITS, EXIT_PLANNED, EXIT_WRONG_INPUT
from planner.commands.main import run
from planner.errors import InputError
from planner.gpus.catalogue import gpu_rows
from planner.gpus.host_memory import local_bytes
from planner.gpus.parse import MOST_GPUS_PER_NODE, parse_cluster
from planner.memory.host import PROCESS_BYTES, host_peak_bytes, loading_bytes, offloaded_activation_bytes
from planner.models.catalogue import load_model
from planner.units import GIB, MIB

LARGE_ON_A_T4 = "--model Llama-3.1-70B --gpus 1xT4 --method sft --tuning lora"
LARGEST_FULL = "--model Llama-3.1-405B --gpus 8xH100 --method sft --tuning full"
LOADED_TWICE = "estimate --model Llama-3.2-3B --gpus 2xL4 --method sft --tuning lora --set dtype=float32 --batch-size 1"


class TestSizes:
    @pytest.mark.parametrize(
        ("gpus", "gib"),
        [
            ("1xT4", 16),  # g4dn.xlarge
            ("4xT4", 192),  # g4dn.12xlarge
            ("8xA10G", 768),  # g5.48xlarge
            ("8xA100-40G", 680),  # a2-highgpu-8g
            ("2x8xH100", 1872),  # a3-highgpu-8g, each node
            ("1xRTX-3060-12G", 16),
            ("2xRTX-3090", 64),
        ],
    )
    def test_a_node_has_what_such_nodes_usually_have(self, gpus: str, gib: int) -> None:
        host = parse_cluster(gpus).host
        assert (host.total_bytes, host.origin) == (gib * GIB, "assumed")
        assert host.source

    def test_a_bare_capacity_has_the_least_of_the_cards_of_that_size(self) -> None:
        host = parse_cluster("1x24GiB").host
        assert (host.total_bytes, host.origin) == (16 * GIB, "assumed")

    def test_a_larger_node_has_no_less(self) -> None:
        for row in gpu_rows():
            sizes = [row.host_bytes(gpus) for gpus in range(1, MOST_GPUS_PER_NODE + 1)]
            assert sizes == sorted(sizes) and sizes[0] >= 16 * GIB

    def test_the_option_wins(self) -> None:
        host = parse_cluster("4xT4", None, "200GiB").host
        assert (host.total_bytes, host.origin) == (200 * GIB, "given")

    def test_gigabytes_are_those_of_vendors(self) -> None:
        assert parse_cluster("4xT4", "15GB", "744GB").host.total_bytes == 744 * 10**9
        assert parse_cluster("4xT4", "15GB", None).gpu.free_bytes == 15 * 10**9

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("24Gb/s", "^'24Gb/s' is not a size"),
            ("200", r"^--host-memory 200 is not between 1 GiB and 65,536 GiB\. Did you mean 200GiB\?$"),
            ("0", r"is not between 1 GiB and 65,536 GiB\.$"),
            ("99999GiB", r"is not between 1 GiB and 65,536 GiB\.$"),
        ],
    )
    def test_an_impossible_size_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(InputError, match=message):
            parse_cluster("1xT4", None, text)

    def test_a_bad_size_ends_the_command_with_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run([*LARGE_ON_A_T4.split(), "--host-memory", "much"]) == EXIT_WRONG_INPUT
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("Error: 'much' is not a size")
        assert captured.err.count("\n") == 1


class TestThisMachine:
    def test_it_has_its_physical_memory(self, tmp_path: Path) -> None:
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
        assert local_bytes(tmp_path) == 1024 * int(line.split()[1])

    @pytest.mark.parametrize(
        ("groups", "limit"),
        [
            ("0::/pod/one\n", "sys/fs/cgroup/pod/memory.max"),
            ("4:cpu,memory:/pod\n0::/\n", "sys/fs/cgroup/memory/pod/memory.limit_in_bytes"),
        ],
    )
    def test_a_container_has_no_more_than_its_control_group(self, tmp_path: Path, groups: str, limit: str) -> None:
        for path, text in (("proc/self/cgroup", groups), (limit, f"{GIB}\n"), ("sys/fs/cgroup/memory.max", "max\n")):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        assert local_bytes(tmp_path) == GIB


class TestVerdict:
    def test_weights_that_only_a_large_node_holds_do_not_fit(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run([*LARGE_ON_A_T4.split(), "--quiet", "-v"]) == EXIT_NOTHING_FITS
        captured = capsys.readouterr()
        assert "153.6 of 16.0 GiB of memory on each node assumed from AWS g4dn" in " ".join(captured.out.split())
        assert captured.err == (
            "Error: No candidate fits 1 x T4 (14.6 GiB). The nearest needs 153.6 GiB of host memory on a node of "
            "16.0 GiB (90 % of which is planned, as it is assumed from AWS g4dn.xlarge and larger). "
            "To fit: --host-memory 171GiB.\n"
        )

    def test_they_fit_where_the_node_has_enough(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run([*LARGE_ON_A_T4.split(), "--host-memory", "200GiB", "--json", "--quiet"]) == EXIT_PLANNED
        report = json.loads(capsys.readouterr().out)
        assert report["best"]["host"]["capacity_bytes"] == 200 * GIB
        assert report["best"]["host"]["peak_bytes"] < 200 * GIB
        assert report["cluster"]["host"] == {
            "total_bytes": 200 * GIB,
            "origin": "given",
            "source": "--host-memory",
            "whole": False,
        }

    def test_the_largest_model_is_told_how_many_nodes_hold_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run([*LARGEST_FULL.split(), "--json", "--quiet"]) == EXIT_NOTHING_FITS
        report = json.loads(capsys.readouterr().out)
        assert report["best"]["host"]["peak_bytes"] > 9000 * GIB
        assert report["best"]["fit_probability"] == 0.0
        for remedy in report["remedies"]:
            assert remedy["fits"] and remedy["host"]["peak_bytes"] <= remedy["host"]["capacity_bytes"]
        assert "64 GPUs" in [remedy["change"] for remedy in report["remedies"]]

    def test_a_candidate_that_a_node_cannot_load_does_not_fit(self, capsys: pytest.CaptureFixture[str]) -> None:
        command = [*LOADED_TWICE.split(), "--quiet", "--host-memory"]
        assert run([*command, "27GiB"]) == EXIT_NOTHING_FITS
        assert capsys.readouterr().err == (
            "Error: The candidate does not fit: it needs 27.9 GiB of host memory on a node of 27.0 GiB. It fits with "
            "--host-memory 31GiB, if your nodes have that; ask plan without estimate for what fits in less.\n"
        )
        assert run([*command, "31GiB"]) == EXIT_PLANNED

    @pytest.mark.parametrize(("given", "verdict"), [("31GiB", "fits"), ("28GiB", "tight")])
    def test_a_given_size_of_which_little_is_left_is_tight(
        self, given: str, verdict: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """27.9 GiB; of 252 GiB 248.2 "fit", and the run was killed (hiyouga/LLaMA-Factory#4629)."""
        command = [*LOADED_TWICE.split(), "--json", "--quiet"]
        assert run([*command, "--host-memory", given]) == EXIT_PLANNED
        best = json.loads(capsys.readouterr().out)
        assert (best["fits"], best["tight"]) == (True, verdict == "tight")
        assert any("host memory would be used" in warning for warning in best["warnings"]) is best["tight"]

    def test_the_reported_job_that_was_killed_is_tight(self, capsys: pytest.CaptureFixture[str]) -> None:
        """hiyouga/LLaMA-Factory#4629: glm-4-9b in full on one card, states and parameters offloaded, of 252 GB full."""
        text = (
            "estimate --model glm-4-9b --gpus 1xA100-80G --method sft --tuning full --set zero_stage=3 "
            "--set offload_optimizer_device=cpu --set offload_param_device=cpu --host-memory 252GiB --json --quiet"
        )
        assert run(text.split()) == EXIT_PLANNED
        best = json.loads(capsys.readouterr().out)
        assert best["tight"] and round(best["host"]["peak_bytes"] / GIB, 1) == 248.2

    def test_a_search_uses_a_given_size_whole_if_nothing_leaves_a_tenth(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        command = [*LOADED_TWICE.removeprefix("estimate ").split(), "--json", "--quiet", "--host-memory", "28GiB"]
        assert run(command) == EXIT_PLANNED
        report = json.loads(capsys.readouterr().out)
        assert report["verdict"] == "tight" and report["best"]["host"]["peak_bytes"] > 0.9 * 28 * GIB
        assert sum("host memory would be used" in warning for warning in report["warnings"]) == 1

    def test_a_search_loads_in_less_where_a_node_is_small(self, capsys: pytest.CaptureFixture[str]) -> None:
        command = [*LOADED_TWICE.removeprefix("estimate ").split(), "--json", "--quiet", "--host-memory", "20GiB"]
        assert run(command) == EXIT_PLANNED
        assert json.loads(capsys.readouterr().out)["best"]["host"]["peak_bytes"] <= 20 * GIB


def test_offloading_keeps_the_inputs_of_24_layers_and_the_last_output_on_the_host() -> None:
    settings: dict[str, Any] = {"tuning": "lora", "dtype": "bfloat16", "max_length": 2048}
    settings |= {"per_device_train_batch_size": 1, "padded": False}
    usual = Candidate(model=load_model("Qwen2.5-0.5B"), method="sft", **settings)
    for changes, layers in (({}, 0), ({"activation_offloading": True}, 25), ({"checkpoint_offload": True}, 25)):
        case = training_settings(replace(usual, **changes))
        assert offloaded_activation_bytes(case, parse_cluster("1xL4")) == layers * 2048 * 896 * 2


def test_a_node_holds_the_processes_that_run_on_it() -> None:
    """Four on four of its eight GPUs, or half of the eight on two nodes; PyTorch takes 1.96 GiB of each."""
    usual = Candidate(model=load_model("Qwen2.5-0.5B"), method="sft", tuning="lora", dtype="bfloat16", sharding="ddp")
    four = training_settings(replace(usual, num_processes=4))
    of_eight = training_settings(replace(usual, num_processes=8, num_nodes=2))
    peaks = {host_peak_bytes(four, parse_cluster(gpus)) for gpus in ("4xH100", "8xH100")}
    assert peaks == {host_peak_bytes(of_eight, parse_cluster("2x4xH100"))}
    assert 4 * PROCESS_BYTES < peaks.pop() < 5 * PROCESS_BYTES


def test_eight_processes_that_load_a_7b_hold_what_was_published() -> None:
    """lm-sys/FastChat#114, by `top`: 213,289.8 MiB in use, 25.7 GiB resident in each process, CUDA not started yet."""
    usual = Candidate(model=load_model("huggyllama/llama-7b"), method="sft", tuning="full", num_processes=8)
    loaded = loading_bytes(state_settings(replace(usual, sharding="fsdp2")), 8)
    assert loaded / 8 / GIB == pytest.approx(25.1, abs=0.05)
    assert loaded + 8 * PROCESS_BYTES == pytest.approx(213_289.8 * MIB, rel=0.04)


def test_the_script_of_ppo_loads_four_models_on_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    """huggingface/trl#2719: four of 7B in float32, without a device map, about 113 GiB."""
    command = "estimate --model Qwen2.5-7B --gpus 1xA100-80G --method ppo --tuning full --json --quiet"
    run(command.split())
    host = json.loads(capsys.readouterr().out)["host"]["peak_bytes"]
    assert host - PROCESS_BYTES == pytest.approx(113 * GIB, rel=0.01)
