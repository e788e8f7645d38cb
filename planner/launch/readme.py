"""README.md of the exported folder: the steps in start order, and the values that the plan did not choose."""

import shlex
from collections.abc import Mapping

from planner.candidate import Candidate
from planner.jobs.settings import settings_of, settings_text
from planner.launch import requirements, trl_config
from planner.launch.rented import DSTACK_FILE, HF_JOBS_FILE, KUBEFLOW_FILE, MODAL_FILE, SKY_FILE, SUBMITIT_FILE
from planner.launch.shell import LAUNCH_FILE, SLURM_FILE, title, training_line
from planner.launch.site import Site
from planner.launch.trl_config import FILL_IN, Launcher

README_FILE = "README.md"

# Source: TRL's documentation, docs/source/peft_integration.md, "Learning Rate Considerations".
LORA_RATE = (
    "That is meant for full fine-tuning of most methods; TRL's documentation recommends about 10 times as much "
    "for LoRA (https://huggingface.co/docs/trl/peft_integration)."
)

ABOUT: dict[str, str] = {
    "train.yaml": "the settings of the training, under TRL's names",
    "accelerate.yaml": "the processes, for `accelerate launch`",
    "deepspeed.json": "DeepSpeed's sharding and bucket sizes",
    "train.py": "the training script, where TRL's command cannot do what was planned",
    "rewards.py": f"the reward function: {FILL_IN}",
    "requirements.txt": "the packages, in releases that work together",
    LAUNCH_FILE: "starts the training on one node",
    SKY_FILE: (
        "the same on a machine rented through SkyPilot: `sky launch sky.yaml`. The disk of rented machines is planned "
        f"for two checkpoints: `save_total_limit: 1` in {trl_config.FILE} keeps no more, without it all are kept"
    ),
    DSTACK_FILE: "the same through dstack: `dstack apply -f dstack.yml`",
    HF_JOBS_FILE: "the same on Hugging Face Jobs: `bash hf_jobs.sh`",
    KUBEFLOW_FILE: "the same by Kubeflow Trainer: `kubectl create -f kubeflow.yaml`",
    MODAL_FILE: "the same at Modal: `modal run modal_app.py`",
    SUBMITIT_FILE: "the same on a SLURM cluster, from Python: `python submitit_job.py`",
    SLURM_FILE: "starts the training on several nodes under SLURM",
}


def readme(
    candidate: Candidate, texts: Mapping[str, str], launcher: Launcher = "accelerate", site: Site | None = None
) -> str:
    """The text of README.md: the commands in the order in which they are run, and one line for each file.

    `texts`: the other files.
    """
    files = "\n".join(f"- `{name}`: {ABOUT[name]}" for name in texts)
    train = texts[trl_config.FILE]
    settings = {
        name: value
        for name, value in settings_of(candidate).items()
        if not isinstance(value, (dict, list)) and value is not None
    }
    estimate = ["plan", "estimate", "--config", trl_config.FILE, *(site.flags if site is not None else ())]
    where = "on these GPUs or others" if site is not None else "with the GPUs as `--gpus`, such as `--gpus 2xA100-40G`"
    return (
        f"# {title(candidate)}\n\n"
        f"1. Complete the lines marked {FILL_IN} (`grep -n '{FILL_IN}' *`):\n{_to_fill_in(candidate, site, texts)}\n"
        f"2. Install: `pip install -r {requirements.FILE}`\n"
        f"3. Start: {_start(candidate, launcher)}\n"
        f"{_resume(candidate)}\n"
        f"{files}\n\n"
        f"The plan did not choose these values, which do not change memory:\n\n{_not_chosen(candidate, train)}\n\n"
        f"The plan counts with the data's longest rows: {_lengths(candidate)}.\n\n"
        f"The memory and speed of these files, after a change of them too, {where}:\n\n"
        f"    {shlex.join(estimate)}\n\n"
        f"All settings: `{settings_text(settings)}`\n"
    )


def _to_fill_in(candidate: Candidate, site: Site | None, texts: Mapping[str, str]) -> str:
    """A list of what the user has to fill in."""
    marked = [line for line in texts[trl_config.FILE].splitlines() if line.endswith(FILL_IN)]
    lines = []
    if any(line.lstrip().startswith("dataset_name") for line in marked):
        split = "" if candidate.eval_strategy == "no" else ", with a split `test` (or `dataset_test_split`)"
        columns = f"; its columns: {candidate.method_row.columns}"
        lines.append(f"`dataset_name` in train.yaml: a dataset of the Hub, or a folder with one{split}{columns}")
    if f"{trl_config.REWARD_MODULE}.py" in texts:
        taught = ", and from which SDPO learns only where it reaches `success_reward_threshold`, 1.0"
        taught *= candidate.method_row.longest_reprompt > 0
        taught += ", and of which A2PO expects 0 or 1" * candidate.method_row.samples_values
        lines.append(f"the function in rewards.py, which prefers short completions now{taught}")
    lines += _teacher_to_serve(candidate, marked)
    argument = candidate.method_row.reward_model_argument
    if argument and any(line.lstrip().startswith(argument) for line in marked):
        lines.append(f"`{argument}` in train.yaml: a trained reward model, no larger than the policy")
    if candidate.num_nodes > 1:
        lines.append(f"the time and the partition in {SLURM_FILE}")
    elif site is None or not site.skypilot_cards:
        lines.append(f"the card in {SKY_FILE}")
    return "\n".join(f"   - {line}" for line in lines) or "   - there is none"


def _teacher_to_serve(candidate: Candidate, marked: list[str]) -> list[str]:
    """Return the line about a teacher that is served elsewhere; none without one."""
    command = "trl vllm-serve --model TEACHER"
    if candidate.method_row.asynchronous:
        command = "vllm serve TEACHER --logprobs-mode processed_logprobs --max-logprobs -1"
    return [
        f"`{address}` in train.yaml: where the teacher is served, on GPUs of its own, by `{command} --port "
        f"{candidate.method_row.teacher_port}`"
        for address in trl_config.teacher_address(candidate)
        if any(line.startswith(address) for line in marked)
    ]


def _start(candidate: Candidate, launcher: Launcher) -> str:
    """The commands that start the training, each by itself."""
    if candidate.num_nodes > 1:
        return f"`sbatch {SLURM_FILE}`"
    started = (
        f"`bash {LAUNCH_FILE}`, or `sky launch {SKY_FILE}`, which installs too. Arguments of TRL may follow, as in "
        f"`bash {LAUNCH_FILE} --max_steps 2`"
    )
    return f"{started}. {LAUNCH_FILE} runs `{training_line(candidate, launcher)}`"


def _resume(candidate: Candidate) -> str:
    """The step with which a run that was interrupted goes on; empty if it cannot.

    `trl` takes the text "true" of its command line for a folder, and YAML's true for the last checkpoint.
    """
    if not (candidate.method_row.resumes and candidate.loads_checkpoints):
        return ""
    keys = "`resume_from_checkpoint: true`" + (" and `ignore_data_skip: true`" if candidate.skips_no_batches else "")
    return f"4. Go on after a stop: {keys} in {trl_config.FILE} takes the last checkpoint\n"


def _not_chosen(candidate: Candidate, train: str) -> str:
    """A list of values that TRL's defaults decide, or the user's own file."""
    if trl_config.HEADER not in train:
        return (
            f"- all keys of {trl_config.FILE} that are not marked. It is the file that was given; lines that the plan "
            "changed or added end with `# plan: ...`."
        )
    rate = candidate.method_row.learning_rate
    rate_line = f"- `learning_rate`: TRL's default{f', {rate}' if rate else ''}."
    if candidate.tuning == "lora":
        rate_line += f" {LORA_RATE}"
    if candidate.teacher_model is candidate.model:
        rate_line += (
            "\n- `teacher_model_name_or_path`: no teacher was named, so that the student's own model stands there; "
            "`plan --set teacher_model_name_or_path=...` plans for another."
        )
    if candidate.teacher_server_gpus and candidate.teacher_server_model is candidate.model:
        rate_line += (
            "\n- the teacher: none was named, so that its server has the student's own model; `plan --set "
            "teacher_server_model=...` plans for another."
        )
    return (
        f"{rate_line}\n- `num_train_epochs` or `max_steps`, the schedule and warm-up, `weight_decay`, `seed`: TRL's "
        "defaults.\n- `save_steps`, `logging_steps`, `report_to`: TRL's defaults."
    )


def _lengths(candidate: Candidate) -> str:
    """The row lengths for which memory was planned."""
    if not candidate.method_row.generates:
        return f"{candidate.max_length} tokens per row (`max_length`)"
    uncut = "" if candidate.method_row.cuts_prompts else " (TRL does not truncate them)"
    return f"prompts of {candidate.prompt_length} tokens{uncut} and completions of {candidate.max_completion_length}"
