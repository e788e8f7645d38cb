"""Start exported launch files as a user would, on an emulated machine: the model cut to a few layers, two steps, a
checkpoint, and one step from that.
"""

import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from msgspec import Struct
from msgspec.structs import replace

from planner.ask import estimated, silent
from planner.candidate import MODEL_FIELDS, Candidate
from planner.commands.main import run as plan_command
from planner.estimation import estimate, worst_batch
from planner.gpus.cluster import Cluster
from planner.gpus.parse import parse_cluster
from planner.launch.placement import placement
from planner.launch.shell import LAUNCH_FILE, SLURM_FILE
from planner.launch.trl_config import DATASET, FACTS, FILE, OUTPUT
from planner.measurements.validate import counted_bytes
from planner.models.shape import ModelShape
from planner.quantities import Estimate
from planner.requests.options import CandidateOptions
from planner.requests.read_options import read_options
from planner.training_stack import complete_models, import_torch
from probes.emulated_gpu.machine import Machine
from probes.emulated_gpu.start import machine_environment, plugin_folder
from probes.runner.devices import REAL_PROCESSES, checkpoint_bytes
from probes.runner.host import with_environment
from probes.runner.runner import ALLOCATOR_VARIABLES, OUTER_LAUNCHERS
from probes.task import Task, usual_steps

if TYPE_CHECKING:
    from probes.trainers import Row, TokenSource

ROOT = Path(__file__).resolve().parents[1]
HOOK = Path(__file__).resolve().with_name("user_process")  # the folder of sitecustomize.py, which names the variables
RECORDS, ALONE, TEACHER = "PLAN_START_RECORDS", "PLAN_START_ALONE", "PLAN_START_TEACHER"
COMMANDS = ("trl", "accelerate", "torchrun", "vllm")  # that launch files call, beside `python`
SECONDS, SERVED_SECONDS = 600.0, 1800.0  # after which a start is ended: one beside a server, which compiles, later
PROCESSOR, TOKENIZER_ALONE = "processor_config.json", '{"processor_class": "PreTrainedTokenizerFast"}'
LARGEST_CHECKPOINT_BYTES = 2 * 2**30  # a larger one is not written: its bytes are real
# Arguments that a user who tries files adds: a folder for what is saved, and no tracker.
TRIAL = ("--output_dir", OUTPUT, "--report_to", "none", "--logging_steps", "1", "--disable_tqdm", "true")
SRUN = '#!/usr/bin/env bash\nwhile [[ $1 == --* ]]; do shift; done\nSLURM_PROCID=0 exec "$@"\n'
SCONTROL = "#!/usr/bin/env bash\nfor node in $(seq {nodes}); do echo 127.0.0.1; done\n"


class Files(Struct, frozen=True, kw_only=True):
    """Launch files that are ready to start, the estimate of them, and the emulated machine's kind."""

    folder: Path
    gpus: str
    estimate: Estimate

    @property
    def candidate(self) -> Candidate:
        return self.estimate.candidate

    @property
    def cluster(self) -> Cluster:
        return parse_cluster(self.gpus, None)

    @property
    def alone(self) -> bool:
        """True if rank 0 runs alone: there are more ranks than run here."""
        return self.candidate.num_processes > REAL_PROCESSES and self.candidate.vllm == "off"

    @property
    def host_bytes(self) -> int:
        """Main memory of the processes that run here, as estimated."""
        candidate = self.candidate
        on_a_node = min(-(-candidate.num_processes // candidate.num_nodes), self.cluster.gpus_per_node)
        return self.estimate.host_peak_bytes * (1 if self.alone else on_a_node) // on_a_node

    @property
    def steps(self) -> int:
        """Steps before the checkpoint: two, or as many as a rollout after the optimizer's first update takes."""
        return usual_steps(self.candidate)

    @property
    def saves(self) -> bool:
        return checkpoint_bytes(self.candidate) <= LARGEST_CHECKPOINT_BYTES

    @property
    def as_run(self) -> Candidate:
        """The candidate with the rows of the start.

        A process that samples for one prompt gets completions of one length: a model of random weights does not end
        them. So they have no padding, which the plan counts where it is the heavier kind.
        """
        candidate = self.candidate
        one_prompt = candidate.method_row.grouped_completions and not candidate.prompts_differ
        return replace(candidate, padded=False) if one_prompt else candidate

    @property
    def allocated_bytes(self) -> int:
        """What PyTorch allocates at most on a training GPU, as estimated."""
        return self._most(estimate(self.as_run, self.cluster))

    @property
    def resumed_bytes(self) -> int:
        """The same of a run that goes on from a checkpoint."""
        return self._most(estimate(replace(self.as_run, resume_from_checkpoint="true"), self.cluster))

    def _most(self, answer: Estimate) -> int:
        phases = answer.gpus[0].phases
        return max(counted_bytes(phase, "allocated", answer.candidate, self.cluster.gpu) for phase in phases)


class Ended(Struct, frozen=True, kw_only=True):
    """How a start ended: its exit code, what each process recorded, and the error that ended it."""

    exit_code: int
    seconds: float
    records: tuple[dict[str, int], ...]
    message: str

    def most(self, name: str) -> int:
        """Return the largest figure of that name; 0 if no process recorded it."""
        return max((record.get(name, 0) for record in self.records), default=0)


def estimate_of(folder: Path, gpus: str) -> Estimate:
    """Return what `plan estimate --config train.yaml` says of the files."""
    options = CandidateOptions(config=str(folder / FILE), gpus=gpus)
    return estimated(read_options(options, complete_models(silent)))[0]


def exported(options: Sequence[str], launcher: str, config: str, work: Path) -> Path | None:
    """Return the folder of a plan's launch files, as the command writes them; None if nothing is planned that fits.

    `config`: the text of the user's own train.yaml; empty: there is none.
    """
    saved, folder, own = work / "saved", work / "run", work / "own.yaml"
    kept = ["--config", str(own)] if config else []
    own.write_text(config, encoding="utf-8")
    if plan_command([*options, *kept, "--quiet", "--out", str(saved), "--export", str(folder)]) != 0:
        return None
    if launcher != "accelerate":
        shutil.rmtree(folder)
        wanted = ["--launcher", launcher, *kept]
        if plan_command(["export", str(saved / "plan.json"), str(folder), *wanted]) != 0:
            return None
    return folder


def gpus_of(folder: Path) -> str:
    """Return the GPUs that the files are for, as their README says: fewer nodes, where those are enough."""
    command = re.search(r"plan estimate .*--gpus (\S+)", (folder / "README.md").read_text(encoding="utf-8"))
    if command is None:
        raise ValueError(f"{folder}/README.md names no GPUs.")
    return command[1]


def completed(folder: Path, work: Path) -> Files:
    """Complete launch files as their README says: with a dataset, and models of a few layers in place of the real ones.

    Raises:
        PlanError: the files of the cut model are refused.
    """
    gpus, data = gpus_of(folder), work / "data"
    candidate = estimate_of(folder, gpus).candidate
    used = (candidate.model, *(getattr(candidate, field) for field in MODEL_FIELDS[1:]))
    names = {DATASET: str(data)}
    for model in {each.id: each for each in used if each is not None}.values():
        names[model.id] = str(cut_model(model, work / "models"))
    for path in folder.iterdir():
        path.write_text(with_names(path.read_text(encoding="utf-8"), names), encoding="utf-8")
    files = Files(folder=folder, gpus=gpus, estimate=estimate_of(folder, gpus))
    write_rows(files, data)
    return files


def cut_model(model: ModelShape, parent: Path) -> Path:
    """Write a model of a few layers, with weights that are holes, and return its folder.

    Where its images are not planned, its processor is a tokenizer alone.
    """
    import_torch()
    from probes.layers.few_layers import few_layers
    from probes.worker.random_weights import model_folder, write_sparse_checkpoint

    published = {"quantization": model.quantization, "quantization_group_size": model.quantization_group_size}
    folder = model_folder(replace(few_layers(model), **published), parent)
    write_sparse_checkpoint(folder)
    if not (folder / PROCESSOR).exists():
        (folder / PROCESSOR).write_text(TOKENIZER_ALONE, encoding="utf-8")
    return folder


def with_names(text: str, names: Mapping[str, str]) -> str:
    """Return a launch file's text with other names, but in the lines that are comments, which only people read."""
    for old, new in names.items():
        whole = re.compile(rf"(?<![\w/]){re.escape(old)}(?![\w/.-])")
        lines = text.splitlines(keepends=True)
        text = "".join(line if _is_comment(line) else whole.sub(new, line) for line in lines)
    return text


def _is_comment(line: str) -> bool:
    return line.startswith("#") and not line.startswith(FACTS)


def write_rows(files: Files, folder: Path) -> None:
    """Write a dataset whose batches are the worst that the estimate counts with, as files of Parquet."""
    from probes.worker.worst_batch import worst_case_datasets

    candidate = worst_batch(files.candidate, files.cluster)
    task = Task(candidate=candidate, device="emulated", folder=str(folder), steps=files.steps, evaluate=True)
    folder.mkdir(parents=True)
    splits = {"train_dataset": "train", "eval_dataset": "test"}
    for name, rows in worst_case_datasets(task, _row_of(candidate)).items():
        rows.to_parquet(folder / f"{splits[name]}.parquet")


def _row_of(candidate: Candidate) -> "Row":
    """Return the function that makes a row of a user's dataset: a probe's, but for images that its collator adds."""
    from probes.trainers import TRAINERS, kto_row

    recipe = TRAINERS[candidate.method]
    if not candidate.images_per_row or recipe.processes_images:
        return recipe.row

    def with_image(candidate: Candidate, tokens: "TokenSource", index: int, short: int) -> dict[str, Any]:
        row = kto_row(candidate, tokens, index, short)
        del row["label"]
        if candidate.method_row.rows_per_sample == 2:  # preferences
            row |= {"chosen": row["completion"], "rejected": row.pop("completion")}
        return row

    return with_image


def environment_of(files: Files, work: Path, records: Path) -> dict[str, str]:
    """Return the environment of the files' processes, whose commands are those of this Python's environment."""
    machine = Machine(gpu=files.cluster.gpu, cards=placement(files.candidate).gpus_per_node, one_of_many=files.alone)
    nodes = placement(files.candidate).train_nodes
    programs = work / "bin"
    programs.mkdir(exist_ok=True)
    for point in importlib.metadata.entry_points(group="console_scripts"):
        if point.name in COMMANDS:
            module, _, function = point.value.partition(":")
            ends = f'if __name__ == "__main__":\n    sys.exit({function}())\n'  # not where a process is spawned
            code = f"#!{sys.executable}\nimport sys\nfrom {module} import {function}\n{ends}"
            _program(programs / point.name, code)
    _program(programs / "srun", SRUN)
    _program(programs / "scontrol", SCONTROL.format(nodes=nodes))
    dropped = OUTER_LAUNCHERS | ALLOCATOR_VARIABLES | {"CUDA_VISIBLE_DEVICES"}
    own = {
        "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(HOOK), str(ROOT), str(plugin_folder(work))]),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",  # TRL, which this process has imported, makes it "ERROR"
        "PYTHONUNBUFFERED": "1",  # a server is killed with what it has not written
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HOME": str(work / "cache"),
        "TMPDIR": str(work),
        RECORDS: str(records),
        "SLURM_SUBMIT_DIR": str(files.folder),
        "SLURM_JOB_NODELIST": "nodes",
        "SLURM_JOB_ID": "1",
        "SLURM_CPUS_ON_NODE": str(os.cpu_count()),
    }
    own |= {ALONE: "1"} if files.alone else {}
    teacher = files.candidate.teacher_server_model
    own |= {TEACHER: teacher.path} if teacher is not None and files.candidate.teacher_server_gpus else {}
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | own | machine_environment(machine, work)


def _program(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def as_yaml(arguments: Sequence[str]) -> str:
    """Return arguments of a command as lines of YAML, where a bare `no` would be False."""
    pairs = zip(arguments[::2], arguments[1::2], strict=True)
    shown = ((name.removeprefix("--"), value if value.isdigit() else f'"{value}"') for name, value in pairs)
    return "".join(f"{name}: {value}\n" for name, value in shown)


def started(files: Files, arguments: Sequence[str], work: Path, name: str) -> Ended:
    """Run the start script with more arguments; whatever it does, nothing of it is left running."""
    records = work / f"{name}-records"
    records.mkdir()
    script = next(each for each in (LAUNCH_FILE, SLURM_FILE) if (files.folder / each).exists())
    log, begun = work / f"{name}.log", time.monotonic()
    train = files.folder / FILE
    written = train.read_text(encoding="utf-8")
    if script == SLURM_FILE:  # takes no arguments: they are lines of train.yaml
        train.write_text(written + as_yaml(arguments), encoding="utf-8")
        arguments = ()
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", script, *arguments], cwd=files.folder, env=environment_of(files, work, records),
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        limit, late = SERVED_SECONDS if placement(files.candidate).beside_gpus else SECONDS, ""
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            late = f"it was ended after {limit:.0f} s; "
        finally:
            left = with_environment(RECORDS, str(records))  # torchrun's are in sessions of their own
            for each in left:
                with contextlib.suppress(psutil.NoSuchProcess):  # ended meanwhile
                    each.kill()
            process.wait()
            psutil.wait_procs(left)
            train.write_text(written, encoding="utf-8")
    error = "" if process.returncode == 0 else error_in(log.read_text(encoding="utf-8", errors="replace"))
    return Ended(
        exit_code=process.returncode,
        seconds=round(time.monotonic() - begun, 1),
        records=tuple(json.loads(path.read_text(encoding="utf-8")) for path in sorted(records.iterdir())),
        message=late + error,
    )


def error_in(log: str) -> str:
    """Return the line of a log that says why a process ended: the last one that begins with an exception's name."""
    errors = re.findall(
        r"^(?:\[rank\d+\]: ?)?((?:[\w.]+\.)?\w*(?:Error|Exception|Exit|Refused)\b.*)$", log, re.MULTILINE
    )
    own = [
        line for line in errors if not line.startswith(("subprocess.CalledProcessError", "torch.distributed.elastic"))
    ]
    lines = own or errors or log.strip().splitlines() or ["no output"]
    return lines[-1][:400]


def trial(files: Files) -> tuple[str, ...]:
    """Return the arguments of both starts.

    Rows keep their order where the files say that each batch holds padding: rows of one length, which a random order
    can join in a batch, run another attention kernel. AsyncDistillation takes the Hub's FlashAttention 3 unless told.
    """
    import_torch()
    from probes.trainers import names_of

    row = files.candidate.method_row
    if row.asynchronous and not row.packs_trees:
        return (*TRIAL, "--model_init_kwargs", '{"attn_implementation": "flash_attention_2"}')
    if files.candidate.padded is not True:
        return TRIAL
    own = ("--shuffle_dataset", "false") if "shuffle_dataset" in names_of(files.candidate) else ()
    return (*TRIAL, "--train_sampling_strategy", "sequential", *own)


def trial_arguments(files: Files) -> tuple[str, ...]:
    """Return the arguments of the first start: its steps, and a checkpoint and an evaluation after them."""
    saving = (
        ("--save_strategy", "steps", "--save_steps", str(files.steps)) if files.saves else ("--save_strategy", "no")
    )
    evaluating = ("--eval_steps", str(files.steps)) if files.candidate.eval_strategy != "no" else ()
    return ("--max_steps", str(files.steps), *saving, *evaluating, *trial(files))


def resume_arguments(files: Files) -> tuple[str, ...]:
    """Return the arguments of the second start: one step more, from the checkpoint."""
    checkpoint = f"{OUTPUT}/checkpoint-{files.steps}"
    steps = ("--max_steps", str(files.steps + 1), "--save_strategy", "no")
    skipped = ("--ignore_data_skip", "true") if files.candidate.skips_no_batches else ()  # as the README says
    return (*steps, "--resume_from_checkpoint", checkpoint, *skipped, *trial(files))
