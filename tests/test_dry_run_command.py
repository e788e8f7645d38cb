"""`plan dry-run`, and the dry run of the answer of `plan`, on an emulated GPU that answers at once."""

import json
from collections.abc import Callable
from pathlib import Path

import jsonschema
import pytest
from msgspec.structs import replace

import planner.training_stack
from planner.candidate import Candidate
from planner.commands.exit_codes import EXIT_NOTHING_FITS, EXIT_OTHER, EXIT_PLANNED, EXIT_WRONG_INPUT
from planner.commands.main import run
from planner.errors import InputError
from planner.estimation import estimate
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.jobs.settings import settings_of
from planner.measurements.dry_run import dry_run_of
from planner.measurements.measurement import Measurement, PhasePeak, RankMemory, Shortage, without_memory
from planner.measurements.validate import counted_bytes
from planner.memory.runtime import context_bytes
from planner.models.catalogue import load_model
from planner.report.documents.schema import json_schema
from planner.requests.saved_report import candidate_from_settings
from planner.units import GIB

ONE = [
    "--model",
    "Qwen2.5-0.5B",
    "--gpus",
    "1xA100-40G",
    "--method",
    "sft",
    "--tuning",
    "lora",
    "--max-length",
    "256",
    "--batch-size",
    "2",
    "--no-padded",
]
MODEL = load_model("Qwen2.5-0.5B")
CANDIDATES = [
    Candidate(model=MODEL, method="sft"),
    Candidate(
        model=MODEL, method="grpo", tuning="lora", vllm="colocate", sharding="zero3", num_processes=4, dtype="bfloat16"
    ),
    Candidate(
        model=MODEL,
        method="sft",
        tuning="lora",
        quantization="nf4",
        sharding="fsdp2",
        num_processes=8,
        num_nodes=2,
        offload_param=True,
    ),
    Candidate(model=MODEL, method="grpo", reward_model=MODEL, vllm="server", sharding="ddp", num_processes=3),
    Candidate(model=MODEL, method="reward", checkpoint_every_n_layers=2, precision="fp16"),
    Candidate(
        model=MODEL,
        method="sft",
        tuning="lora",
        lora_target_modules=("q_proj", "v_proj"),
        expandable_segments=True,
        checkpoint_offload=True,
    ),
]


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda candidate: f"{candidate.method}-{candidate.sharding}")
def test_a_saved_candidate_is_read_back_as_it_was(candidate: Candidate) -> None:
    read = candidate_from_settings(settings_of(candidate), lambda model: model)
    assert read.model.id == candidate.model.id
    models = {"model": MODEL, "reward_model": candidate.reward_model, "teacher_model": candidate.teacher_model}
    assert replace(read, **models) == candidate  # type: ignore[arg-type]


def test_an_estimate_saved_without_its_cluster_needs_to_be_told_its_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["estimate", *ONE, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    del report["cluster"]  # as before estimates said it, and as Python's do
    path = tmp_path / "estimate.json"
    path.write_text(json.dumps(report))
    assert run(["dry-run", str(path)]) == EXIT_WRONG_INPUT
    assert "Give --gpus" in capsys.readouterr().err


Answers = Callable[[Candidate], Measurement]


def emulated(candidate: Candidate, cluster: Cluster, more_bytes: int = 0) -> Measurement:
    """The measurement of a run that needs the estimate and `more_bytes` in every phase, with 1 GiB in its cache."""
    context = context_bytes(cluster.gpu)
    peaks = []
    for phase in estimate(candidate, cluster).gpus[0].phases:
        allocated = counted_bytes(phase, "allocated", candidate, cluster.gpu) + more_bytes
        reserved = allocated + phase.components.get("fragmentation", 0) + GIB
        driver = reserved + context
        peaks.append(
            PhasePeak(
                name=phase.name, allocated_bytes=allocated, reserved_bytes=reserved, driver_bytes=driver, seconds=0.0
            )
        )
    rank = RankMemory(rank=0, phases=tuple(peaks), state_bytes={}, capacity_bytes=cluster.gpu.free_bytes, allocator={})
    found = without_memory(candidate, "emulated", "fits", "")
    return replace(found, ranks=(rank,), versions={"torch": "2.13.0", "trl": "1.16.0"})


def test_a_reference_s_pass_is_compared_with_the_loss_that_it_is_estimated_in() -> None:
    """As a run counts it: "score" is wherever a model is called without gradients."""
    candidate, cluster = Candidate(model=load_model("SmolLM2-135M"), method="dpo", beta=0.1), A100
    ran = emulated(candidate, cluster)
    loss = next(peak for peak in ran.ranks[0].phases if peak.name == "loss")
    smaller = replace(loss, allocated_bytes=loss.allocated_bytes - GIB)
    for passed, scored in ((loss, smaller), (smaller, loss)):
        peaks = tuple(passed if peak.name == "loss" else peak for peak in ran.ranks[0].phases)
        peaks += (replace(scored, name="score"),)
        run = dry_run_of(
            estimate(candidate, cluster), replace(ran, ranks=(replace(ran.ranks[0], phases=peaks),)), cluster.gpu
        )
        assert [phase.difference for phase in run.phases if phase.peak.name in ("loss", "score")] == [0]


def out_of_memory(candidate: Candidate, cluster: Cluster) -> Measurement:
    """A run whose backward pass found no room for 1 GiB, with half of it free."""
    ran = emulated(candidate, cluster)
    reached = tuple(phase for phase in ran.ranks[0].phases if phase.name in ("load", "forward"))
    short = Shortage(
        rank=0, phase="backward", tried_bytes=GIB, free_bytes=GIB // 2, allocated_bytes=38 * GIB,
        reserved_bytes=39 * GIB,
    )  # fmt: skip
    return replace(
        ran,
        outcome="out_of_memory",
        shortage=short,
        ranks=(replace(ran.ranks[0], phases=reached),),
        message="CUDA out of memory. Tried to allocate 1.00 GiB.",
    )


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Answers], list[Candidate]]:
    """Let dry runs be answered by a function; returns the list of the candidates that ran."""

    def use(answers: Answers) -> list[Candidate]:
        ran: list[Candidate] = []

        def answer(candidate: Candidate) -> Measurement:
            ran.append(candidate)
            return answers(candidate)

        monkeypatch.setattr(planner.training_stack, "open_dry_run", lambda cluster, report_phase: answer)
        return ran

    monkeypatch.setenv("PLAN_CACHE", str(tmp_path / "cache"))
    return use


A100, A10G = parse_cluster("1xA100-40G"), parse_cluster("1xA10G")


class TestCommand:
    def test_both_rungs_stand_side_by_side(self, card, capsys: pytest.CaptureFixture[str]) -> None:
        card(lambda candidate: emulated(candidate, A100))
        assert run(["dry-run", *ONE]) == EXIT_PLANNED
        out, err = capsys.readouterr()
        assert "emulated   estimated  difference    reserved" in out
        assert err == "running sft of Qwen/Qwen2.5-0.5B on an emulated A100-40G ...\n"
        (peak,) = [line.split() for line in out.splitlines() if line.endswith("◂ peak")]
        assert peak[1] == peak[2] and peak[3] in ("+0.0%", "-0.0%")
        assert " of 39.5 GiB are needed, estimated: " in out

    def test_json_says_that_it_is_emulated(self, card, capsys: pytest.CaptureFixture[str]) -> None:
        card(lambda candidate: emulated(candidate, A100, GIB))
        assert run(["dry-run", *ONE, "--json", "--quiet"]) == EXIT_PLANNED
        report = json.loads(capsys.readouterr().out)
        jsonschema.validate(report, json_schema())
        assert (report["evidence"], report["fits"], report["out_of_memory"]) == ("emulated", True, None)
        assert report["peak_bytes"] == max(phase["total_bytes"] for phase in report["phases"])
        assert report["peak_bytes"] == report["estimated"]["peak_bytes"] + GIB
        assert report["difference"] == round(report["estimated"]["peak_bytes"] / report["peak_bytes"] - 1, 6)
        for phase in report["phases"]:
            assert phase["allocated_bytes"] == phase["estimated_allocated_bytes"] + GIB
            assert phase["allocated_bytes"] < phase["reserved_bytes"] < phase["driver_bytes"]

    def test_a_run_that_finds_no_room_says_so_in_pytorchs_words(self, card, capsys) -> None:
        card(lambda candidate: out_of_memory(candidate, A100))
        assert run(["dry-run", *ONE]) == EXIT_NOTHING_FITS
        assert "runs out in the backward: CUDA out of memory. Tried to allocate 1.00 GiB." in capsys.readouterr().out
        assert run(["dry-run", *ONE, "--json", "--quiet"]) == EXIT_NOTHING_FITS
        report = json.loads(capsys.readouterr().out)
        jsonschema.validate(report, json_schema())
        assert report["out_of_memory"]["phase"] == report["peak_phase"] == "backward"
        assert report["out_of_memory"]["unallocated_bytes"] == GIB
        assert report["peak_bytes"] == A100.gpu.free_bytes + GIB // 2 and not report["fits"]

    def test_a_run_that_crashes_is_no_answer(self, card, capsys) -> None:
        card(lambda candidate: without_memory(candidate, "emulated", "crashed", "KeyError: 'q'"))
        assert run(["dry-run", *ONE]) == EXIT_OTHER
        assert "The dry run says nothing about memory: crashed. KeyError: 'q'" in capsys.readouterr().err

    def test_without_a_package_a_line_says_what_to_install(self, monkeypatch, capsys) -> None:
        real = planner.training_stack.find_spec
        monkeypatch.setattr(planner.training_stack, "find_spec", lambda name: None if name == "trl" else real(name))
        assert run(["dry-run", *ONE]) == EXIT_WRONG_INPUT
        said = "Error: A dry run needs the extra dryrun (pip install 'finetune-plan[dryrun]'): trl not installed.\n"
        assert capsys.readouterr() == ("", said)

    @pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "aarch64"), ("Windows", "AMD64")])
    def test_elsewhere_one_line_names_the_rest(self, system: str, machine: str, monkeypatch, capsys) -> None:
        monkeypatch.setattr("platform.system", lambda: system)
        monkeypatch.setattr("platform.machine", lambda: machine)
        for command in (["dry-run", *ONE], ["estimate", *ONE, "--dry-run"], [*ONE, "--dry-run"]):
            assert run(command) == EXIT_WRONG_INPUT
            out, err = capsys.readouterr()
            assert out == "" and err.count("\n") == 1
            assert "needs Linux on x86-64. Elsewhere there are estimates, --device cpu" in err


class TestCheck:
    JOB = ("--model", "Qwen2.5-1.5B", "--gpus", "1xA10G", "--method", "sft", "--tuning", "lora", "--json", "--quiet",
           "--set", "attn_implementation=sdpa", "--set", "use_liger_kernel=false")  # fmt: skip

    def test_an_estimate_is_checked_when_asked(self, card, capsys: pytest.CaptureFixture[str]) -> None:
        card(lambda candidate: emulated(candidate, A100))
        assert run(["estimate", *ONE, "--dry-run", "--quiet"]) == EXIT_PLANNED
        out = " ".join(capsys.readouterr().out.split())
        assert "a dry run with the installed trl 1.16.0 on an emulated GPU needed" in out

    def test_the_plan_is_searched_again_when_the_run_needs_more_than_the_estimate_allows(self, card, capsys) -> None:
        assert run([*self.JOB]) == EXIT_PLANNED
        first = json.loads(capsys.readouterr().out)["best"]["gpus"][0]["peak_bytes"]
        card(lambda candidate: emulated(candidate, A10G, first))
        assert run([*self.JOB, "--dry-run"]) == EXIT_PLANNED
        report = json.loads(capsys.readouterr().out)
        assert report["best"]["gpus"][0]["phases"][-1]["components"]["unexplained"] > 0
        lines = report["warnings"]
        assert any("searched again with 100.0% more memory for this tuning class" in line for line in lines)

    def test_a_run_out_of_memory_searches_again_too(self, card, capsys) -> None:
        card(lambda candidate: out_of_memory(candidate, A10G))
        assert run([*self.JOB, "--dry-run"]) == EXIT_PLANNED
        codes = [note["code"] for note in json.loads(capsys.readouterr().out)["warnings_data"]]
        assert codes[:2] == ["dry_run_ran_out", "searched_again"]

    def test_what_is_not_installed_here_is_not_planned(self, card, monkeypatch, capsys) -> None:
        real = planner.training_stack.find_spec
        lacking = ("liger_kernel", "flash_attn", "kernels")
        monkeypatch.setattr(planner.training_stack, "find_spec", lambda name: None if name in lacking else real(name))
        ran = card(lambda candidate: emulated(candidate, A10G))
        assert run([*self.JOB[:-2], "--dry-run"]) == EXIT_PLANNED
        report = json.loads(capsys.readouterr().out)
        assert not ran[0].use_liger_kernel and not report["best"]["settings"]["use_liger_kernel"]
        assert "liger_not_installed" in [note["code"] for note in report["warnings_data"]]

    def test_a_run_that_crashes_leaves_the_estimate_and_a_line(self, card, capsys) -> None:
        card(lambda candidate: without_memory(candidate, "emulated", "crashed", "KeyError: 'q'"))
        assert run(["estimate", *ONE]) == EXIT_PLANNED
        plain = capsys.readouterr()
        assert run(["estimate", *ONE, "--dry-run"]) == EXIT_PLANNED
        checked = capsys.readouterr()
        assert "no dry run: The dry run says nothing about memory: crashed. KeyError: 'q'" in " ".join(
            checked.out.split()
        )
        assert checked.out.splitlines()[:8] == plain.out.splitlines()[:8]


def test_a_run_within_the_interval_exceeds_nothing() -> None:
    answer = estimate(CANDIDATES[0], A100)
    train = answer.gpus[0]
    width = train.interval_bytes[1] - train.peak_bytes
    within, above = (dry_run_of(answer, emulated(CANDIDATES[0], A100, more), A100.gpu) for more in (width, width + 1))
    assert within.exceeded_by == 0.0
    assert above.exceeded_by == (train.interval_bytes[1] + 1) / train.peak_bytes - 1


def test_an_installed_stack_of_another_cuda_is_refused_in_one_line(monkeypatch, capsys) -> None:
    def refuse() -> Path:
        raise InputError("An emulated GPU needs PyTorch's build for CUDA 13")

    monkeypatch.setattr("probes.emulated_gpu.build.built_libraries", refuse)
    assert run([*ONE, "--dry-run"]) == EXIT_WRONG_INPUT
    assert capsys.readouterr().err == "Error: An emulated GPU needs PyTorch's build for CUDA 13\n"
