"""`plan --config`: what the files set is pinned, `--free` gives it to the search, and the answer names the changes."""

import json
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from planner.candidate import FIELDS, Candidate
from planner.commands.main import run
from planner.files.write import write_files
from planner.gpus.parse import parse_cluster
from planner.jobs.base_candidate import single_candidate
from planner.jobs.config_changes import config_changes
from planner.jobs.job import Job
from planner.launch.files import launch_files
from planner.methods import METHODS, MethodName
from planner.models.catalogue import load_model
from planner.planning import plan
from planner.report.sentences import sentences
from planner.search.knobs import SEARCHED, TUNING_CLASSES, SearchProblem
from planner.search.structures import structures

LOGS = Path(__file__).parent / "logs"
TRAIN = """
model_name_or_path: Qwen/Qwen2.5-7B
use_peft: true
lora_r: 32
lora_target_modules: all-linear
per_device_train_batch_size: 8
gradient_accumulation_steps: 2
max_length: 4096
gradient_checkpointing: false
learning_rate: 1.0e-5
"""
LAUNCH = "distributed_type: DEEPSPEED\nnum_processes: 2\nnum_machines: 1\ndeepspeed_config: {zero_stage: 2}\n"


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """The flags of a TRL config and an accelerate config."""
    (tmp_path / "train.yaml").write_text(TRAIN)
    (tmp_path / "accelerate.yaml").write_text(LAUNCH)
    where = [f"--config={tmp_path / 'train.yaml'}", f"--accelerate-config={tmp_path / 'accelerate.yaml'}"]
    return [*where, "--gpus", "2xA100-40G", "--method", "sft", "--json", "--quiet"]


def free(*names: str) -> list[str]:
    return [f"--free={name}" for name in names]


def test_a_search_keeps_what_the_files_set(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(files) == 3  # without checkpointing it does not fit
    report = json.loads(capsys.readouterr().out)
    wanted = {"lora_r": 32, "per_device_train_batch_size": 8, "gradient_checkpointing": False, "zero_stage": 2}
    assert {name: report["best"]["settings"][name] for name in wanted} == wanted
    assert report["best"]["settings"]["attn_implementation"] == "flash_attention_2"  # not in the files


def test_what_is_freed_is_searched_and_the_effective_batch_stays(
    files: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("gradient_checkpointing", "per_device_train_batch_size", "gradient_accumulation_steps")
    assert run([*files, *free(*names)]) == 0
    report = json.loads(capsys.readouterr().out)
    settings = report["best"]["settings"]
    assert settings["gradient_checkpointing"] is True
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 8 * 2
    changes = [line for line in report["warnings"] if line.startswith("config ")]
    assert changes == [
        "config dtype: not set -> bfloat16",
        f"config per_device_train_batch_size: 8 -> {settings['per_device_train_batch_size']}",
        f"config gradient_accumulation_steps: 2 -> {settings['gradient_accumulation_steps']}",
        "config gradient_checkpointing: false -> true",
        "config every_n_layers: not set -> 2",
        "config use_liger_kernel: not set -> true",
        "config PYTORCH_CUDA_ALLOC_CONF: not set -> expandable_segments:True",
    ]


def test_with_the_sharding_its_sizes_are_freed(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*files, "--free=zero_stage,gradient_checkpointing", *free("use_peft")]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["best"]["settings"]["lora_r"] == 32
    assert "full fine-tuning" in {other["label"] for other in report["alternatives"]}


def test_flags_win_over_the_files(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*files, "--set", "gradient_checkpointing=true"]) == 0
    assert "config gradient_checkpointing: false -> true" in json.loads(capsys.readouterr().out)["warnings"]


@pytest.mark.parametrize(
    "flags",
    [
        ["--set=distributed_type=FSDP"],
        ["--tuning=full", "--set=distributed_type=FSDP", "--set=fsdp_offload_params=true"],
        ["--tuning=qlora"],
        ["--set=zero_stage=3", "--set=offload_param_device=cpu"],
    ],
)
def test_a_flag_takes_the_details_of_the_files_with_it(
    files: list[str], flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["estimate", *files, *flags, "--set=gradient_checkpointing=true"]) in (0, 3)
    report = json.loads(capsys.readouterr().out)
    assert ("reduce_bucket_size" in report["settings"]) == ("zero_stage" in report["settings"])
    assert ("lora_r" in report["settings"]) == ("--tuning=full" not in flags)


def test_adapters_that_a_flag_asks_for_and_no_file_sets_are_the_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """PEFT has no default layers for llava, with which TRL would start a file that has `use_peft` alone."""
    file = tmp_path / "train.yaml"
    file.write_text("learning_rate: 1.0e-4\n", encoding="utf-8")
    wanted = ["--model", "llava-1.5-7b-hf", "--gpus", "1xA100-40G", "--method", "sft", "--json", "--quiet"]
    assert run([*wanted, "--config", str(file), "--tuning", "lora"]) == 0
    assert json.loads(capsys.readouterr().out)["best"]["settings"]["lora_target_modules"] == "all-linear"


@pytest.mark.parametrize(
    ("lines", "flag", "left"),
    [
        ("load_in_4bit: true\nuse_bnb_nested_quant: true", "use_bnb_nested_quant=false", {"load_in_4bit": True}),
        ("load_in_4bit: true", "use_bnb_nested_quant=true", {"load_in_4bit": True, "use_bnb_nested_quant": True}),
        ("load_in_4bit: true", "load_in_8bit=false", {"load_in_4bit": True}),
        ("load_in_4bit: true\nuse_bnb_nested_quant: true", "load_in_4bit=false", {"load_in_4bit": False}),
        ("load_in_4bit: true", "load_in_8bit=true", {"load_in_4bit": False, "load_in_8bit": True}),
        ("bf16: false", "fp16=false", {"bf16": False, "fp16": False}),
        ("fp16: true", "bf16=false", {"bf16": False, "fp16": True}),
        ("bf16: true", "fp16=true", {"bf16": False, "fp16": True}),
        ("deepspeed: zero3.json", "distributed_type=DEEPSPEED", {"zero_stage": 3}),
        ("deepspeed: zero3.json", "distributed_type=MULTI_GPU", {"distributed_type": "MULTI_GPU"}),
    ],
)
def test_a_flag_leaves_what_the_files_say_beside_it(
    lines: str, flag: str, left: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "zero3.json").write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    config = tmp_path / "train.yaml"
    config.write_text(f"model_name_or_path: Qwen/Qwen2.5-0.5B\nuse_peft: true\n{lines}\n")
    command = ["estimate", f"--config={config}", "--gpus=2xA100-40G", "--method=sft", "--set", flag]
    assert run([*command, "--json", "--quiet"]) in (0, 3)
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert {name: settings.get(name) for name in left} == left


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--free=lora_r"], "--free lora_r leaves nothing to decide: no search changes it. Use --set lora_r=..."),
        (["--free=max_length"], "--free max_length leaves nothing to decide: no search changes it. Use --optimize"),
        (["--free=lora_rank"], "Unknown setting 'lora_rank'. Did you mean lora_r"),
        (["--deepspeed-config=none.json"], "The DeepSpeed config none.json cannot be read: No such file"),
    ],
)
def test_what_cannot_be_is_refused(
    files: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*files, *arguments]) == 2
    assert message in capsys.readouterr().err


FULL = "use_peft: false\ndtype: bfloat16\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 4\n"
SYNC = "accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}\n"
FSDP = "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n"


def test_a_file_that_accumulates_under_fsdp2_has_whole_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """8.03 billion parameters: 2 bytes each on every GPU, or with `sync_each_batch` an eighth in float32."""
    (tmp_path / "accelerate.yaml").write_text(FSDP)
    asked = "estimate --model Llama-3.1-8B --method sft --gpus 8xA100-40G --json --set max_length=1024 {}"
    gradients = {}
    for name, text in {"default": FULL, "synced": FULL + SYNC, "none": None}.items():
        where = f"--accelerate-config {tmp_path / 'accelerate.yaml'}"
        if text is None:
            where += " --tuning full --set per_device_train_batch_size=1 --set gradient_accumulation_steps=4"
        else:
            (tmp_path / "train.yaml").write_text(text)
            where += f" --config {tmp_path / 'train.yaml'}"
        run(asked.format(where).split())
        answer = json.loads(capsys.readouterr().out)
        forward = next(phase for phase in answer["gpus"][0]["phases"] if phase["name"] == "forward")
        gradients[name, answer["settings"]["sync_each_batch"]] = round(forward["components"]["gradients"] / 1e9, 1)
    assert gradients == {("default", False): 16.1, ("synced", True): 4.0, ("none", True): 4.0}


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "bfd-requeue", "wrapped"])
def test_wrapped_rows_stay_rows_of_a_batch(tmp_path: Path, strategy: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Eager attention: 58 bytes a score (14 heads) of one row of 4,096 tokens, a quarter of it for 4 rows of 1,024."""
    train = f"per_device_train_batch_size: 4\npacking: true\npacking_strategy: {strategy}\n"
    (tmp_path / "train.yaml").write_text(train + "attn_implementation: eager\ndtype: bfloat16\n")
    run(f"estimate --model Qwen2.5-0.5B --method sft --gpus 1xH200 --json --config {tmp_path / 'train.yaml'}".split())
    report = json.loads(capsys.readouterr().out)
    backward = next(phase for phase in report["gpus"][0]["phases"] if phase["name"] == "backward")
    assert (backward["components"]["attention_scores"] == 973_078_528) == (strategy != "wrapped")
    assert report["settings"].get("packing_strategy", "bfd") == strategy.replace("-requeue", "_split")


@pytest.mark.parametrize(("flags", "warned"), [((), True), (("--max-length=4096",), False)])
def test_rows_that_are_not_cut_have_no_known_length(
    tmp_path: Path, flags: tuple[str, ...], warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.yaml").write_text("max_length: null\n")
    asked = f"estimate --model Qwen2.5-0.5B --method sft --gpus 1xH100 --json --config {tmp_path / 'train.yaml'}"
    run([*asked.split(), *flags])
    report = json.loads(capsys.readouterr().out)
    assert report["settings"]["max_length"] == (1024 if warned else 4096)
    said = [line for line in report["warnings"] if "the longest is not known: 1,024 tokens are planned" in line]
    assert bool(said) == warned


@pytest.mark.parametrize(("lmbda", "generates"), [(0.0, False), (0.1, True)])
def test_gkd_on_the_rows_of_the_dataset_alone_generates_nothing(
    tmp_path: Path, lmbda: float, generates: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.yaml").write_text(f"lmbda: {lmbda}\nmax_length: 2048\n")
    run(f"estimate --model Qwen2.5-0.5B --method gkd --gpus 1xH100 --json --config {tmp_path / 'train.yaml'}".split())
    report = json.loads(capsys.readouterr().out)
    assert ("rollout" in {phase["name"] for phase in report["gpus"][0]["phases"]}) == generates
    assert report["settings"]["lmbda"] == lmbda


@pytest.mark.parametrize(("dtype", "bytes_each"), [(None, 4), ("bfloat16", 2), ("auto", 2), ("float32", 4)])
def test_a_teacher_is_loaded_in_its_own_dtype(
    tmp_path: Path, dtype: str | None, bytes_each: int, capsys: pytest.CaptureFixture[str]
) -> None:
    train = "teacher_model_name_or_path: Qwen/Qwen2.5-3B\ndtype: float32\n"
    train += f"teacher_model_init_kwargs: {{dtype: {dtype}}}\n" if dtype else ""
    (tmp_path / "train.yaml").write_text(train)
    config = f"--config {tmp_path / 'train.yaml'}"
    run(f"estimate --model Qwen2.5-0.5B --method distillation --gpus 1xH200 --json {config}".split())
    report = json.loads(capsys.readouterr().out)
    weights = report["gpus"][0]["phases"][0]["components"]["weights"]
    assert weights - 4 * 494_032_768 == pytest.approx(bytes_each * 3_085_938_688, rel=1e-3)
    assert report["settings"].get("teacher_dtype") == dtype


def test_without_a_file_there_is_nothing_to_free(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--model=Qwen2.5-7B", "--gpus=1xH100", "--method=sft", "--free=dtype"]) == 2
    assert "frees a setting of a config file, and there is none" in capsys.readouterr().err


@pytest.mark.parametrize("command", [[], ["estimate"], ["dry-run"], ["probe"], ["diagnose"]])
def test_every_command_of_a_job_takes_the_files(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run([*command, "--help"])
    page = capsys.readouterr().out
    assert all(flag in page for flag in ("--config FILE", "--accelerate-config FILE", "--deepspeed-config FILE"))


def test_a_diagnosis_replans_the_job_of_the_files(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diagnose", str(LOGS / "dpo_wrapped.log"), *files]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["expected"]["settings"]["zero_stage"] == 2
    assert report["instead"]["settings"]["gradient_checkpointing"] is True


@pytest.mark.parametrize(
    ("model", "method", "gpus"),
    [
        ("Qwen2.5-7B", "grpo", "2xA100-40G"),
        ("Qwen2.5-7B", "grpo", "2x8xH100"),
        ("Llama-3.1-8B", "sft", "8xH100"),
        ("Qwen2.5-0.5B", "distillation", "1xL4"),
        ("Qwen3-1.7B", "online-dpo", "3xA100-40G"),
        ("gemma-2-2b", "ppo", "1xH100"),
    ],
)
def test_the_files_of_a_plan_give_the_plan(
    model: str, method: str, gpus: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(model=load_model(model), method=method)  # type: ignore[arg-type]
    best = plan(job, parse_cluster(gpus)).best
    write_files(launch_files(best.candidate), tmp_path, overwrite=False)
    data = ["--no-padded"] * (not best.candidate.padded)
    data += ["--prompt-length", str(best.candidate.prompt_length)] * METHODS[method].generates  # type: ignore[index]
    if best.candidate.vllm == "server":
        data += ["--set", f"vllm_data_parallel_size={best.candidate.vllm_data_parallel_size}"]
    where = [f"--config={tmp_path / 'train.yaml'}", f"--accelerate-config={tmp_path / 'accelerate.yaml'}"]
    assert run([*where, *data, "--gpus", gpus, "--method", method, "--json", "--quiet"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["best"]["throughput"]["tokens_per_second"] == round(best.throughput.tokens_per_second, 6)
    assert report["best"]["gpus"][0]["peak_bytes"] == best.gpus[0].peak_bytes
    assert [line for line in report["warnings"] if "config" in line and "not used" not in line] == [
        "the config needs no change"
    ]


@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_what_may_be_freed_is_what_searches_change(method: MethodName) -> None:
    job, cluster = Job(model=load_model("Qwen2.5-0.5B"), method=method), parse_cluster("2x3xH100")
    found = [
        candidate
        for tuning_class in TUNING_CLASSES
        for offload in (False, True)
        for candidate in structures(SearchProblem(job=job, cluster=cluster, tuning_class=tuning_class, offload=offload))
    ]
    changed = {field for field in FIELDS if len({getattr(each, field) for each in found}) > 1}
    changed |= {"use_liger_kernel"} if all(each.use_liger_kernel for each in found) else set()  # set, not searched
    batch = {"per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation", "sync_each_batch"}
    batch |= {"per_device_eval_batch_size"}  # of jobs that evaluate
    if method == "grpo":
        of_others = {"bnb_4bit_quant_storage", "packing", "precompute_ref_log_probs", "stage3_prefetch_bucket_size"}
        of_others |= {"checkpoint_every_n_layers", "checkpoint_offload", "activation_offloading", "token_budget"}
        of_others |= {"ep_size"}  # of mixtures of experts
        engine = {"vllm_gpu_memory_utilization", "vllm_max_model_length"}
        assert changed | batch | engine | of_others == SEARCHED
    assert changed <= SEARCHED


def test_a_list_and_a_word_are_written_as_in_yaml() -> None:
    held = Candidate(
        model=load_model("Qwen2.5-0.5B"), method="sft", tuning="lora", lora_target_modules=("q_proj", "k_proj")
    )
    assert sentences(config_changes({"tuning": "full"}, held)) == (
        "config use_peft: false -> true",
        "config lora_target_modules: not set -> [q_proj, k_proj]",
        "config lora_dropout: not set -> 0.0",
    )


def test_online_dpos_engine_takes_the_share_of_its_own_config() -> None:
    """Source: trl 1.0 to 1.16, experimental/online_dpo/online_dpo_config.py; GRPO's and RLOO's is 0.3."""
    shares = {}
    for method in ("online-dpo", "rloo"):
        job = Job(model=load_model("Qwen2.5-0.5B"), method=method, pinned={"vllm": "colocate"})
        shares[method] = single_candidate(job, parse_cluster("1xH100")).vllm_gpu_memory_utilization
    assert shares == {"online-dpo": 0.55, "rloo": 0.3}


def test_changes_of_a_config_are_against_the_defaults_of_its_tool() -> None:
    """PEFT's own targets were a change, its default dropout was none, and Axolotl's checkpointing was TRL's."""
    held = Candidate(model=load_model("Qwen2.5-0.5B"), method="sft", tuning="lora", lora_dropout=0.05)
    of_peft = replace(held, lora_target_modules=("q_proj", "v_proj"))
    assert sentences(config_changes({"tuning": "lora"}, of_peft)) == ()
    everywhere = ("config lora_target_modules: not set -> all-linear",)
    assert (
        sentences(config_changes({"tuning": "lora"}, replace(held, lora_target_modules=("all-linear",)))) == everywhere
    )
    of_axolotl = replace(of_peft, tool="axolotl", gradient_checkpointing=False, per_device_train_batch_size=1)
    changed = sentences(config_changes({"tuning": "lora"}, of_axolotl))
    assert not any("gradient_checkpointing" in change for change in changed)


def test_a_freed_batch_frees_the_accumulation_with_it(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The file's accumulation stayed, so that with the effective batch nothing was left to decide."""
    assert run([*files, "--free=per_device_train_batch_size"]) in (0, 3)
    settings = json.loads(capsys.readouterr().out)["best"]["settings"]
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 8 * 2
    assert settings["per_device_train_batch_size"] < 8


def test_the_effective_batch_of_a_freed_batch_has_the_processes_of_the_flags(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With 1 process instead of the file's 8, the batch of 8 became 64."""
    (tmp_path / "train.yaml").write_text("per_device_train_batch_size: 8\nuse_peft: true\n")
    (tmp_path / "ddp.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 8\n")
    where = [f"--config={tmp_path / 'train.yaml'}", f"--accelerate-config={tmp_path / 'ddp.yaml'}"]
    job = ["--model", "Qwen2.5-0.5B", "--method", "sft", "--gpus", "8xA100-40G", "--json", "--quiet"]
    job.append("--set=num_processes=1")
    assert run([*job, *where, "--set=distributed_type=NO", "--free=per_device_train_batch_size"]) == 0
    settings = json.loads(capsys.readouterr().out)["best"]["settings"]
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 8


def test_gpus_that_share_the_files_layers_make_one_batch_when_it_is_freed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The batch of 8 became 16: the file's sharding was not asked how many batches its GPUs have."""
    (tmp_path / "train.yaml").write_text(
        "per_device_train_batch_size: 8\nmodel_init_kwargs: {distributed_config: {tp_size: 2}}\n"
    )
    job = ["--model", "Qwen3-0.6B", "--method", "sft", "--gpus", "2xA100-80G", "--json", "--quiet"]
    assert run([*job, f"--config={tmp_path / 'train.yaml'}", "--free=per_device_train_batch_size"]) == 0
    settings = json.loads(capsys.readouterr().out)["best"]["settings"]
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 8


def test_more_nodes_than_the_accelerate_file_has_override_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "zero3.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_processes: 8\nnum_machines: 1\ndeepspeed_config: {zero_stage: 3}\n"
    )
    job = ["--model", "Qwen2.5-7B", "--method", "sft", "--gpus", "16x8xH100", "--json", "--quiet"]
    assert run([*job, f"--accelerate-config={tmp_path / 'zero3.yaml'}"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["best"]["settings"]["zero_stage"] == 3
    assert any("launch with --num_machines 16 --num_processes 128" in line for line in report["warnings"])


def test_an_accelerate_file_without_fsdp_version_is_of_fsdp_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\nnum_processes: 8\n")
    job = ["estimate", "--model", "Qwen2.5-1.5B", "--method", "sft", "--gpus", "8xH100", "--json"]
    assert run([*job, f"--accelerate-config={tmp_path / 'fsdp.yaml'}"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["settings"]["fsdp_version"] == 1


@pytest.mark.parametrize("file", ["fsdp1", "fsdp.yaml"])
def test_an_accelerate_file_of_fsdp_1_is_read(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """TRL's own fsdp1.yaml was refused, and a file without a version was not."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdp.yaml").write_text("distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 1}\n")
    job = ["estimate", "--model", "Qwen2.5-1.5B", "--method", "sft", "--gpus", "8xH100", "--json"]
    assert run([*job, f"--accelerate-config={file}"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["fsdp_version"] == 1


TRL_JOBS = json.loads((Path(__file__).parent / "data" / "trl_jobs.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", TRL_JOBS["own"])
def test_the_configs_of_trl_jobs_fit_the_card_that_they_were_made_for(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """19 files, as they are: accelerate's `mixed_precision: no` stands beside TRL's bf16, and kernels are the Hub's."""
    keys = TRL_JOBS["shared"] | TRL_JOBS["own"][name]
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(keys), encoding="utf-8")
    job = ["estimate", f"--config={tmp_path / 'train.yaml'}", "--gpus=1xA100-80G", "--method=sft", "--json", "--quiet"]
    assert run(job) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    wanted = {"bf16": True, "attn_implementation": "flash_attention_2", "max_length": keys["max_length"]}
    assert {each: settings[each] for each in wanted} == wanted


@pytest.mark.parametrize(
    ("keys", "precision"),
    [
        ("mixed_precision: no", "bf16"),
        ("mixed_precision: fp16", "bf16"),
        ("mixed_precision: fp16\nbf16: false", "fp16"),
        ("mixed_precision: no\nbf16: false", "no"),
        ("mixed_precision: bf16\nfp16: true", "fp16"),
    ],
)
def test_the_trainers_precision_wins_over_accelerates(
    keys: str, precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Source: transformers 5.23, training_args.py, `TrainingArguments.__post_init__` (`ACCELERATE_MIXED_PRECISION`)."""
    (tmp_path / "train.yaml").write_text(f"{keys}\n", encoding="utf-8")
    job = ["--model=Qwen2.5-0.5B", "--gpus=1xA100-80G", "--method=sft", "--json", "--quiet"]
    assert run(["estimate", f"--config={tmp_path / 'train.yaml'}", *job]) == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert (settings["bf16"], settings["fp16"]) == (precision == "bf16", precision == "fp16")
