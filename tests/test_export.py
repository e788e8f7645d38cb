"""`plan export` and what its files say about the machines that were planned for."""

import ast
import importlib
import json
import os
import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml
from huggingface_hub.cli.hf import app as hf
from msgspec.structs import replace
from test_launch import ENGINES, VARIANTS, candidate

from planner.commands.main import run
from planner.estimation import estimate
from planner.files.write import write_files
from planner.gpus.catalogue import load_gpu
from planner.gpus.hf_jobs import FLAVORS
from planner.gpus.host_memory import with_usual_host
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.launch.files import launch_files
from planner.launch.site import SKYPILOT, Site
from planner.methods import MethodName
from planner.models.catalogue import load_model
from planner.planning import plan
from planner.quantities import Estimate
from planner.report.resources import resources_report, site_of
from planner.rows.lengths import lengths_in_words

GRPO = "--model Qwen2.5-0.5B --gpus 3xL4 --method grpo"
SERVED = "--set use_vllm=true --set vllm_mode=server --set vllm_data_parallel_size=2 --set num_processes=1"


def site(gpus: str, **given: str) -> Site:
    return Site(cluster=parse_cluster(gpus, **given), host_bytes=178 * 2**30)


def planned(model: str, gpus: str, method: MethodName, **pinned: object) -> Estimate:
    return plan(Job(model=load_model(model), method=method, pinned=pinned), parse_cluster(gpus)).best


def test_a_card_has_the_least_memory_or_the_plan_does_not_fit_it() -> None:
    """`gpu_bytes` is the edge, and `cards` are those beyond it that have what the kernels need."""
    best, cluster = planned("Qwen2.5-7B", "2xA100-40G", "grpo"), parse_cluster("2xA100-40G")
    found = site_of(best, cluster)
    for size, fits in ((found.gpu_bytes, True), (found.gpu_bytes - 2**28, False)):
        gpu = replace(cluster.gpu, total_bytes=size, free_bytes=size)
        settings = replace(best.candidate, vllm_gpu_memory_utilization=_share(best, size))
        assert estimate(settings, replace(cluster, gpu=gpu)).fits is fits
    for name in SKYPILOT:
        rented = with_usual_host(parse_cluster(f"2x{name}"))
        small = load_gpu(name).total_bytes < found.gpu_bytes - 2**30
        assert not (small and name in found.cards)
        if name in found.cards:
            assert estimate(best.candidate, rented).fits


def _share(best: Estimate, size: int) -> float:
    """The engine's share of a card of another size that is as many bytes."""
    return best.candidate.vllm_gpu_memory_utilization * best.gpus[0].capacity_bytes / size


class TestSite:
    @pytest.mark.parametrize(
        "flags",
        [
            "--gpus 2xA100-40G",
            "--gpus 4x8xH100-SXM --network 3200Gb",
            "--gpus 1x24GiB --free-memory 20GiB",
            "--gpus 1x23.55GiB --host-memory 100GiB",
            "--gpus 1x24GB",
            "--gpus 1xDGX-Spark",
            "--gpus 2xL4 --free-memory 23000000000",
        ],
    )
    def test_its_options_mean_the_same_cluster(self, flags: str) -> None:
        def cluster(words: list[str]) -> object:
            given = dict(zip(words[::2], words[1::2], strict=True))
            names = ("gpus", "free-memory", "host-memory", "network")
            return parse_cluster(*(given.get(f"--{name}") for name in names))  # type: ignore[arg-type]

        meant = cluster(shlex.split(flags))
        assert cluster(Site(cluster=meant).flags) == meant  # type: ignore[arg-type]

    def test_skypilot_rents_the_card_of_the_plan(self) -> None:
        files = launch_files(candidate("grpo", **ENGINES["server"]), site=site("8xA100-80G"))
        assert yaml.safe_load(files["sky.yaml"])["resources"]["any_of"] == [{"accelerators": "A100-80GB:8"}]
        assert "card in sky.yaml" not in files["README.md"]

    def test_a_card_that_skypilot_has_not_is_to_be_filled_in(self) -> None:
        files = launch_files(candidate("sft"), site=site("1x24GiB"))
        assert "FILL IN" in files["sky.yaml"]
        assert "card in sky.yaml" in files["README.md"]

    def test_a_rented_machine_has_any_card_on_which_the_plan_fits(self) -> None:
        best = planned("Llama-3.1-8B", "1xA100-80G", "sft")
        files = launch_files(best.candidate, site=site_of(best, parse_cluster("1xA100-80G")))
        wanted = yaml.safe_load(files["sky.yaml"])["resources"]
        names = [each["accelerators"] for each in wanted["any_of"]]
        assert "A40:1" in names and "A100-80GB:1" in names and not {"L4:1", "A100:1"} & {*names}
        assert len(names) == len(set(names))
        assert wanted["memory"] == "3+" and wanted["disk_size"] == 256
        task = yaml.safe_load(files["dstack.yml"])
        assert task["resources"]["gpu"] == {
            "vendor": "nvidia", "count": 1, "memory": "48GB..", "compute_capability": 8.0,
        }  # fmt: skip

    def test_hugging_face_jobs_take_the_command(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The cheapest machine with one of the cards, a time from the data's length, by the tool's own parser."""
        best = planned("Llama-3.1-8B", "1xA100-80G", "sft", lengths=lengths_in_words("rows=52002,p50=380,max=8192"))
        where = site_of(best, parse_cluster("1xA100-80G"))
        script = launch_files(best.candidate, site=where)["hf_jobs.sh"]
        line = script.rpartition("\nhf jobs run ")[2].replace("\\\n", " ")
        (hours,) = re.findall(r"^timeout=(\d+)h", script, re.MULTILINE)
        assert int(hours) * 3600 >= 2 * 3 * where.epoch_seconds
        words = shlex.split(line.replace('"$timeout"', f"{hours}h"))
        monkeypatch.setattr("sys.argv", ["hf", "jobs", "run", "--dry-run", *words])
        with pytest.raises(SystemExit) as ended:
            hf()
        assert ended.value.code in (0, None)
        printed = capsys.readouterr().out
        assert "l40sx1" in printed and "Job not submitted" in printed

    def test_without_a_number_of_rows_no_time_is_known(self) -> None:
        """Quantiles alone are drawn as 10,000 rows, which says nothing of the data's length."""
        best = planned("Qwen2.5-0.5B", "1xL4", "sft", lengths=lengths_in_words("p50=380,max=8192"))
        where = site_of(best, parse_cluster("1xL4"))
        assert where.epoch_seconds == 0.0 and resources_report(best.candidate, where).epoch_seconds is None
        assert "timeout=24h  # FILL IN" in launch_files(best.candidate, site=where)["hf_jobs.sh"]

    def test_machines_have_a_card_that_torch_runs_on(self) -> None:
        """A T4's plan fits the memory of V100 and P100, for which torch 2.13 has no kernels, and of t4-small's card."""
        best = planned("Qwen2.5-0.5B", "1xT4", "sft")
        where = site_of(best, parse_cluster("1xT4"))
        assert "T4" in where.cards and not {"V100-16G", "V100-32G", "P100", "P4"} & {*where.cards}
        files = launch_files(best.candidate, site=where)
        assert yaml.safe_load(files["dstack.yml"])["resources"]["gpu"]["compute_capability"] == 7.5
        (flavor,) = (each for each in FLAVORS if f"--flavor {each.name} " in files["hf_jobs.sh"])
        assert flavor.disk_bytes > where.disk_bytes
        assert "`save_total_limit: 1`" in files["README.md"]

    def test_the_disk_of_a_job_has_room_for_its_environment_too(self) -> None:
        """t4-small's 50 GB were taken for 45 GB of weights and checkpoints, beside which pip found no room."""
        best = planned("Qwen2.5-0.5B", "1xT4", "sft")
        where = replace(site_of(best, parse_cluster("1xT4")), disk_bytes=45 * 10**9, cards=("T4",))
        assert "--flavor t4-medium " in launch_files(best.candidate, site=where)["hf_jobs.sh"]

    @pytest.mark.parametrize("method", ["sft", "grpo"])
    def test_one_machine_is_asked_of_every_tool(self, method: MethodName) -> None:
        """The counts, the least memory and the time are the same for Kubeflow, Modal and submitit."""
        best = planned("Qwen2.5-7B", "2xA100-40G", method)
        files = launch_files(best.candidate, site=(where := site_of(best, parse_cluster("2xA100-40G"))))
        host = -(-best.host_peak_bytes // 2**30)
        job = yaml.safe_load(files["kubeflow.yaml"])["spec"]["trainer"]
        assert job["resourcesPerNode"] == {
            "requests": {"memory": f"{host}Gi", "ephemeral-storage": "256Gi"}, "limits": {"nvidia.com/gpu": 2},
        }  # fmt: skip
        asked = {
            keyword.arg: ast.literal_eval(keyword.value)
            for name in ("modal_app.py", "submitit_job.py")
            for call in ast.walk(ast.parse(files[name]))
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") in ("function", "update_parameters")
            for keyword in call.keywords
            if keyword.arg != "volumes"
        }
        assert asked["gpus_per_node"] == 2 and asked["mem_gb"] == host and asked["timeout_min"] == 24 * 60
        assert asked["memory"] == host * 1024 and asked["timeout"] == 24 * 3600
        assert "A100-40GB:2" in asked["gpu"] and "T4:2" not in asked["gpu"] and "H200" in where.cards

    def test_modal_has_no_longer_time_than_a_day(self) -> None:
        best = planned("Llama-3.1-8B", "1xA100-80G", "sft")
        where = replace(site_of(best, parse_cluster("1xA100-80G")), epoch_seconds=10 * 3600)
        files = launch_files(best.candidate, site=where)
        assert "timeout=86400,  # Modal's longest; 60 hours may be needed" in files["modal_app.py"]
        assert "timeout_min=3600,  # twice what 3 epochs are estimated to take" in files["submitit_job.py"]

    def test_a_card_that_modal_has_not_gives_no_file_for_it(self) -> None:
        best = planned("Qwen2.5-0.5B", "1xT4", "sft")
        where = replace(site_of(best, parse_cluster("1xT4")), cards=("RTX-4090",))
        assert {"kubeflow.yaml", "submitit_job.py"} <= launch_files(best.candidate, site=where).keys() - {
            "modal_app.py"
        }

    @pytest.mark.slow
    def test_the_tools_take_these_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """By their own types and parsers (kubeflow 0.5, modal 1.6.4, submitit 1.5.4), where they are installed."""
        for module in ("kubeflow_trainer_api", "modal", "submitit"):
            pytest.importorskip(module)
        best = planned("Qwen2.5-7B", "2xA100-40G", "grpo")
        write_files(launch_files(best.candidate, site=site_of(best, parse_cluster("2xA100-40G"))), tmp_path, False)
        job = yaml.safe_load((tmp_path / "kubeflow.yaml").read_text())
        models = importlib.import_module("kubeflow_trainer_api.models")
        assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
        assert "train" in runpy.run_path(str(tmp_path / "modal_app.py"))
        (tmp_path / "bin").mkdir()
        for name, text in {"srun": "", "sbatch": 'cp "$1" sent.sh; echo Submitted batch job 12'}.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
            (tmp_path / "bin" / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(tmp_path / "submitit_job.py"))
        sent = (tmp_path / "sent.sh").read_text()
        assert {"#SBATCH --gpus-per-node=2", "#SBATCH --time=1440", "#SBATCH --nodes=1"} <= {*sent.splitlines()}

    def test_slurm_gives_each_task_its_whole_node(self) -> None:
        held = candidate("sft", num_nodes=2, num_processes=16, sharding="fsdp2")
        script = launch_files(held, site=site("2x8xH100"))["slurm.sh"]
        lines = [line.partition("  #") for line in script.splitlines() if line.startswith("#SBATCH")]
        assert {line for line, _, _ in lines} >= {"#SBATCH --exclusive", "#SBATCH --mem=0", "#SBATCH --partition=gpu"}
        assert next(why for line, _, why in lines if "--mem" in line) == " all of a node's; the plan needs 178 GiB"
        steps = [line for line in script.splitlines() if line.startswith("srun ")]
        assert steps and all('--cpus-per-task="$SLURM_CPUS_ON_NODE"' in step for step in steps)


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
@pytest.mark.parametrize("settings", [VARIANTS["lora"], ENGINES["server"], {}])
def test_the_readme_shows_the_command_of_the_script(settings: dict[str, object], launcher: str) -> None:
    files = launch_files(candidate("grpo", **settings), launcher)  # type: ignore[arg-type]
    (shown,) = (line for line in files["README.md"].splitlines() if line.startswith("3. Start"))
    command = shown.rpartition(" runs `")[2].removesuffix("`")
    assert f'\n{command} "$@"\n' in files["launch.sh"]


def test_checkpointing_is_spelled_as_the_pinned_release_wants_it() -> None:
    now = yaml.safe_load(launch_files(candidate("grpo"))["train.yaml"])
    assert {"activation_checkpointing", "activation_checkpointing_kwargs"} <= now.keys()
    assert not {"gradient_checkpointing", "gradient_checkpointing_kwargs"} & now.keys()
    with_vllm = yaml.safe_load(launch_files(candidate("grpo", **ENGINES["colocate"]))["train.yaml"])
    assert "gradient_checkpointing" in with_vllm  # vLLM takes an older Transformers


class TestCommand:
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def printed(self, command: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
        capsys.readouterr()
        assert run(shlex.split(command)) == code
        return capsys.readouterr().out

    def test_an_estimate_of_the_files_needs_nothing_again(self, capsys: pytest.CaptureFixture[str]) -> None:
        job = f"{GRPO} {SERVED} --prompt-length 777 --no-padded"
        before = json.loads(self.printed(f"estimate {job} --quiet --json --out saved", capsys))
        self.printed("export saved run", capsys)
        after = json.loads(self.printed("estimate --config run/train.yaml --gpus 3xL4 --json --quiet", capsys))
        assert after["settings"] == before["settings"]
        assert after["settings"]["prompt_length"] == 777
        assert after["settings"]["vllm_data_parallel_size"] == 2
        assert after["gpus"] == before["gpus"]

    def test_flags_win_over_what_the_files_say(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.printed(f"estimate {GRPO} --prompt-length 777 --quiet --out saved", capsys)
        self.printed("export saved run", capsys)
        asked = "estimate --config run/train.yaml --gpus 3xL4 --prompt-length 99 --method rloo --json --quiet"
        settings = json.loads(self.printed(asked, capsys))["settings"]
        assert (settings["prompt_length"], settings["method"]) == (99, "rloo")

    def test_a_line_that_is_none_is_refused(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "train.yaml").write_text("# Read by plan: promptlength=3\nmodel_name_or_path: Qwen/Qwen2.5-0.5B\n")
        assert run(shlex.split("estimate --config train.yaml --gpus 1xL4 --method grpo")) == 2
        assert "promptlength" in capsys.readouterr().err

    def test_what_does_not_fit_is_written_only_if_that_is_meant(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.printed("--model Llama-3.1-70B --gpus 1xT4 --method sft --quiet --out saved", capsys, code=3)
        assert run(["export", "saved", "run"]) == 2
        assert "does not fit its GPUs. Use --anyway" in capsys.readouterr().err
        assert not Path("run").exists()
        assert "run/train.yaml" in self.printed("export saved run --anyway", capsys)

    def test_the_check_in_the_readme_names_the_gpus(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.printed(f"{GRPO} --quiet --out saved", capsys)
        self.printed("export saved run", capsys)
        page = Path("run/README.md").read_text()
        assert "\n    plan estimate --config train.yaml --gpus 3xL4\n" in page
