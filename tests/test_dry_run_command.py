"""`plan dry-run`, and the dry run of the answer of `plan`."""

import json
import sys
from pathlib import Path

import jsonschema
import pytest
from msgspec.structs import replace

from planner.allocator.simulation import Simulation, exceeded_by, single_process, with_reserved
from planner.allocator.trace import STAYS, Allocation, Trace
from planner.candidate import Candidate
from planner.commands.exit_codes import EXIT_WRONG_INPUT
from planner.commands.main import run
from planner.errors import DryRunUnsupported
from planner.estimation import estimate
from planner.gpus.catalogue import load_gpu
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.jobs.settings import settings_of
from planner.models.catalogue import load_model
from planner.quantities import Estimate, PhaseMemory
from planner.report.documents import json_schema
from planner.report.dry_run import difference_notes, dry_run_note, dry_run_report, dry_run_table
from planner.report.json import json_text
from planner.report.sentences import sentence
from planner.requests.saved_report import candidate_from_settings
from planner.units import GIB, MIB

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
SEGMENTS = [
    "--set",
    "expandable_segments=true",
]  # small tensors leave holes otherwise, which the estimate takes for 1.1 %
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


def simulation(simulated_bytes: int, estimated_bytes: int) -> Simulation:
    def phases(size: int) -> tuple[PhaseMemory, ...]:
        return (
            PhaseMemory(name="forward", components={"weights": 1000}),
            PhaseMemory(name="backward", components={"weights": size}),
        )

    return Simulation(
        candidate=CANDIDATES[0],
        trace=Trace(allocations=(), phase_starts=(), versions=(("trl", "1.16.0"),)),
        estimated=phases(estimated_bytes),
        simulated=phases(simulated_bytes),
        composed=False,
    )


def test_the_components_of_the_peak_stand_under_its_row() -> None:
    found = simulation(3 * GIB, 3 * GIB)
    lines = [
        line.split()[:2]
        for line in dry_run_table(found, parse_cluster("1xA100-80G")).plain.splitlines()
        if "3.00" in line
    ]
    assert lines == [["backward", "3.00"], ["weights", "3.00"]]


def test_a_note_names_the_installed_trl_and_how_near_the_dry_run_comes() -> None:
    near, far = simulation(100_000, 101_010), simulation(100_000, 90_000)
    assert sentence(dry_run_note(near)) == "a dry run with the installed trl 1.16.0 agrees within 1.1 %"
    assert sentence(dry_run_note(far)).startswith("a dry run with the installed trl 1.16.0 peaks at")
    assert "11.1% more than estimated; they differ most in the backward" in sentence(dry_run_note(far))
    assert difference_notes(near) == ()


def test_a_dry_run_above_the_interval_or_the_card_is_a_residual() -> None:
    answer = estimate(CANDIDATES[0], parse_cluster("1xA100-40G", None))
    train = answer.gpus[0]
    within, above = (
        replace(simulation(1, 1), simulated=(PhaseMemory(name="backward", components={"weights": size}),))
        for size in (train.interval_bytes[1], train.interval_bytes[1] + 1)
    )
    assert exceeded_by(within, answer) == 0.0
    assert exceeded_by(above, answer) == (train.interval_bytes[1] + 1) / train.peak_bytes - 1


def test_the_plan_is_searched_again_when_the_dry_run_needs_more_than_the_estimate_allows(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model", "Qwen2.5-1.5B", "--gpus", "1xA10G", "--method", "sft", "--tuning", "lora", "--json", "--quiet"]
    asked += ["--set", "use_liger_kernel=false"]
    assert run(asked) == 0
    first = json.loads(capsys.readouterr().out)["best"]["gpus"][0]["peak_bytes"]
    heavy = PhaseMemory(name="backward", components={"weights": 2 * first})
    simulated = replace(simulation(1, 1), simulated=(heavy,), composed=True)
    monkeypatch.setattr("planner.training_stack.dry_run", lambda *_: simulated)
    assert run([*asked, "--dry-run"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["best"]["gpus"][0]["phases"][-1]["components"]["unexplained"] > 0
    assert any("searched again with 100.0% more memory for this tuning class" in line for line in report["warnings"])


def test_a_dry_run_has_liger_s_kernels(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ran: list[bool] = []

    def dry(expected: Estimate, *_: object) -> Simulation:
        ran.append(expected.candidate.use_liger_kernel)
        peak = PhaseMemory(name="backward", components={"weights": expected.gpus[0].peak_bytes})
        return replace(simulation(1, 1), simulated=(peak,), composed=True)

    monkeypatch.setattr("planner.training_stack.dry_run", dry)
    asked = ["--model", "Qwen2.5-1.5B", "--gpus", "1xA10G", "--method", "sft", "--json", "--quiet", "--dry-run"]
    assert run(asked) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["best"]["settings"]["use_liger_kernel"]
    assert ran == [True]


def test_the_steps_own_fragmentation_stands_in_the_place_of_the_estimated_one() -> None:
    made = Allocation(
        size_bytes=4 * MIB, born=0, died=STAYS, phase="backward", component="weights", operator="resident", module=""
    )
    phases = (PhaseMemory(name="backward", components={"weights": 4 * MIB, "fragmentation": 1, "runtime": 100}),)
    one = replace(simulation(1, 1), trace=Trace(allocations=(made,), phase_starts=()), simulated=phases)
    found = with_reserved(one, load_gpu("A100-40G"))
    assert found.simulated[0].components == {"weights": 4 * MIB, "fragmentation": 16 * MIB, "runtime": 100}
    assert with_reserved(replace(one, composed=True), load_gpu("A100-40G")).reserved is None


def test_a_step_that_runs_out_says_so_in_pytorchs_words() -> None:
    made = Allocation(
        size_bytes=GIB, born=0, died=STAYS, phase="backward", component="weights", operator="resident", module=""
    )
    one = replace(simulation(GIB, GIB), trace=Trace(allocations=(made,), phase_starts=()))
    small = replace(load_gpu("A100-40G"), total_bytes=GIB, free_bytes=GIB // 2)
    found = with_reserved(one, small)
    report = json.loads(json_text(dry_run_report(found)))
    jsonschema.validate(report, json_schema())
    assert report["out_of_memory"]["phase"] == "backward"  # type: ignore[index]
    table = dry_run_table(found, Cluster(gpu=small, nodes=1, gpus_per_node=1)).plain
    assert (
        "runs out in the backward: CUDA out of memory. Tried to allocate 1024.00 MiB." in table
        or "Tried to allocate 1.00 GiB." in table
    )


def test_a_dry_run_that_fails_leaves_the_estimate_and_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("trl")
    import probes.dryrun.simulate

    def stops(_: Estimate, kernels: str) -> Simulation:
        raise DryRunUnsupported("The installed libraries stop at it: KeyError: 'q'")

    monkeypatch.setattr(probes.dryrun.simulate, "simulate", stops)
    assert run(["estimate", *ONE]) == 0
    plain = capsys.readouterr()
    assert run(["estimate", *ONE, "--dry-run"]) == 0
    checked = capsys.readouterr()
    assert "no dry run: The installed libraries stop at it: KeyError: 'q'" in checked.out
    assert checked.out.splitlines()[:8] == plain.out.splitlines()[:8]


def test_without_the_packages_a_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:

    monkeypatch.setitem(sys.modules, "probes.dryrun.simulate", None)
    assert run(["dry-run", *ONE]) == EXIT_WRONG_INPUT
    assert "A dry run needs the extra dryrun" in capsys.readouterr().err


def test_a_rank_of_deepspeed_computes_in_16_bits() -> None:
    one = single_process(CANDIDATES[1])
    assert (one.dtype, one.autocast_adapter_dtype, one.sharding, one.vllm) == ("bfloat16", False, "none", "colocate")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
class TestWithTheInstalledStack:
    @pytest.fixture(autouse=True)
    def stack(self) -> None:
        pytest.importorskip("trl")

    def test_both_rungs_stand_side_by_side(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["dry-run", *ONE, *SEGMENTS]) == 0
        out, err = capsys.readouterr()
        assert "simulated   estimated  difference" in out
        assert "alive at the peak of the step" in out
        assert err == "simulating the step: sft of Qwen/Qwen2.5-0.5B ...\n"

    def test_json_says_that_it_is_simulated(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["dry-run", *ONE, "--json", "--quiet"]) == 0
        report = json.loads(capsys.readouterr().out)
        jsonschema.validate(report, json_schema())
        assert report["evidence"] == "simulated"
        assert report["reserved_peak_bytes"] == max(phase.get("reserved_bytes", 0) for phase in report["phases"])
        assert report["peak_bytes"] == max(phase["total_bytes"] for phase in report["phases"])

    def test_an_estimate_is_checked_when_asked(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(["estimate", *ONE, *SEGMENTS, "--dry-run", "--quiet"]) == 0
        assert "a dry run with the installed trl" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "changes",
        [
            {"sharding": "zero2"},
            {"sharding": "zero3"},
            {"sharding": "fsdp2"},
            {"sharding": "ddp", "tuning": "lora", "dtype": "bfloat16"},
        ],
    )
    def test_a_composed_rank_agrees_with_its_estimate(self, changes: dict[str, object]) -> None:
        from probes.dryrun.simulate import simulate
        from probes.layers.few_layers import few_layers

        settings = {
            "model": few_layers(MODEL),
            "method": "sft",
            "num_processes": 4,
            "max_length": 256,
            "padded": False,
            "per_device_train_batch_size": 2,
        }
        candidate = Candidate(**(settings | changes))  # type: ignore[arg-type]
        assert abs(simulate(estimate(candidate, parse_cluster("4xA100-40G", None))).difference) < 0.03

    def test_heads_that_are_no_multiples_of_16_bytes_are_attended_without_a_kernel_of_their_own(self) -> None:
        from probes.dryrun.simulate import simulate
        from probes.layers.few_layers import few_layers

        model = few_layers(load_model("openlm-research/open_llama_3b"))  # heads of 100 features
        candidate = Candidate(
            model=model, method="sft", tuning="lora", dtype="bfloat16", max_length=512, per_device_train_batch_size=4
        )
        assert abs(simulate(estimate(candidate, parse_cluster("1xA100-40G", None))).difference) < 0.01

    def test_an_engine_is_composed_onto_the_trainers_step(self) -> None:
        from probes.dryrun.simulate import simulate
        from probes.layers.few_layers import few_layers

        candidate = Candidate(
            model=few_layers(MODEL), method="grpo", tuning="lora", dtype="bfloat16", vllm="colocate", prompt_length=64,
            max_completion_length=64, num_generations=2, per_device_train_batch_size=2, vllm_max_model_length=128,
            padded=False,
        )  # fmt: skip
        answer = simulate(estimate(candidate, parse_cluster("1xA100-40G", None)))
        assert all(phase.components.get("engine", 0) > 0 for phase in answer.simulated)
        assert abs(answer.difference) < 0.03


def test_a_dry_run_tells_nobody_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trl")
    import huggingface_hub

    from probes.dryrun.dry_run import dry_run
    from probes.layers.few_layers import few_layers

    sent: list[str] = []
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.utils._telemetry._start_telemetry_thread", lambda: sent.append("started"))
    dry_run(Candidate(model=few_layers(MODEL), method="sft", max_length=256))
    assert sent == []
