"""Launch files, read by the programs that they are written for."""

import argparse
import ast
import importlib
import json
import shlex
import subprocess
import textwrap
import venv
import warnings
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, Literal

import pytest
import yaml
from msgspec.structs import replace

from planner.candidate import TORCH_VERSIONS, Candidate
from planner.errors import InputError
from planner.files.write import write_files
from planner.gpus.parse import parse_cluster
from planner.jobs.base_candidate import base_candidate
from planner.jobs.job import Job
from planner.jobs.settings import candidate_fields
from planner.launch.accelerate import accelerate_config
from planner.launch.command import launch_command, server_command
from planner.launch.deepspeed import deepspeed_config
from planner.launch.files import launch_files
from planner.launch.requirements import RELEASES, pins_releases
from planner.launch.shell import launch_script, slurm_script
from planner.launch.torchrun import sharding_settings
from planner.launch.trl_config import DATASET, Launcher, trl_config
from planner.methods import METHODS, MethodName
from planner.models.catalogue import load_model
from planner.optimizers import OPTIMIZERS
from planner.report.shown_settings import flags
from planner.requests.train_config import load_train_config
from planner.settings.table import has_setting
from tests.test_exported_runs import ROWS

# The libraries' own deprecations are not errors; those of our code are.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

GPTQ, AWQ = "Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen2.5-7B-Instruct-AWQ"
MODEL, REWARD = load_model("Qwen/Qwen2.5-0.5B"), load_model("Qwen/Qwen2.5-1.5B")
METHODS_NOW = [name for name, method in METHODS.items() if method.last_trl == "current"]
SCRIPTED = [name for name in METHODS_NOW if METHODS[name].experimental]

VARIANTS: dict[str, dict[str, object]] = {
    "full": {
        "dtype": "bfloat16",
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "use_kernels": True,
    },
    "qlora": {
        "tuning": "lora",
        "quantization": "nf4-double",
        "lora_r": 8,
        "lora_target_modules": ("q_proj", "v_proj"),
        "lora_dropout": 0.05,
    },
    "lora": {
        "tuning": "lora",
        "dtype": "bfloat16",
        "num_processes": 2,
        "sharding": "ddp",
        "attn_implementation": "eager",
        "use_liger_kernel": True,
    },
    "zero2": {
        "num_processes": 4,
        "sharding": "zero2",
        "offload_optimizer": True,
        "optim": "adamw_torch",
        "expandable_segments": True,
    },
    "zero3": {
        "num_processes": 4,
        "sharding": "zero3",
        "offload_param": True,
        "precision": "fp16",
        "checkpoint_every_n_layers": 2,
    },
    "fsdp2": {
        "num_processes": 8,
        "num_nodes": 2,
        "sharding": "fsdp2",
        "offload_param": True,
        "precision": "no",
        "padded": False,
    },
    "FSDP2 accumulating": {
        "num_processes": 8,
        "sharding": "fsdp2",
        "gradient_accumulation_steps": 4,
        "sync_each_batch": True,
    },
    "hybrid FSDP2": {"num_processes": 8, "sharding": "fsdp2", "dp_replicate_size": 2},
    "context parallel": {"num_processes": 8, "sharding": "fsdp2", "cp_size": 4, "padded": False},
    "sequence parallel": {
        "num_processes": 8,
        "sharding": "zero3",
        "sp_size": 2,
        "attn_implementation": "flash_attention_2",
        "padded": False,
    },
    "projected": {"optim": "galore_adamw", "checkpoint_offload": True},
}
ENGINES: dict[str, dict[str, object]] = {
    "colocate": {
        "vllm": "colocate",
        "num_processes": 2,
        "sharding": "ddp",
        "vllm_enable_sleep_mode": True,
        "vllm_gpu_memory_utilization": 0.25,
    },
    "server": {
        "vllm": "server",
        "num_processes": 6,
        "sharding": "zero3",
        "vllm_tensor_parallel_size": 2,
        "vllm_max_model_length": 1024,
    },
}
OF_A_METHOD: dict[MethodName, dict[str, object]] = {
    "sft": {"packing": True, "max_length": 512},
    "dpo": {"padding_free": True, "beta": 0.2},
    "kto": {"precompute_ref_log_probs": True},
    "grpo": {
        "beta": 0.04,
        "num_generations": 4,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "max_completion_length": 128,
        "reward_model": REWARD,
    },
    "online-dpo": {"reward_model": REWARD, "max_length": 600, "max_completion_length": 100},
}


def candidate(method: MethodName, **settings: object) -> Candidate:
    """The candidate of these settings on a cluster that is large enough."""
    beside = METHODS[method].asynchronous and settings.get("num_processes") == 8  # the server has a node of its own
    nodes = settings.get("num_nodes", 1 + beside)
    return base_candidate(
        Job(model=MODEL, method=method, pinned={"num_processes": 1, **settings}), parse_cluster(f"{nodes}x8xH100")
    )


DETAILS = {"checkpoint_every_n_layers", "checkpoint_offload"}


def of_method(method: MethodName, settings: dict[str, object]) -> dict[str, object]:
    """The settings without those that the method does not have or that its trainer decides."""
    left_out = METHODS[method].fixed | {field for field in DETAILS if not has_setting(method, field)}
    return {field: value for field, value in settings.items() if field not in left_out}


CASES = [(method, name, of_method(method, settings)) for method in METHODS_NOW for name, settings in VARIANTS.items()]
CASES += [
    (method, name, of_method(method, settings))
    for method in METHODS_NOW
    if METHODS[method].supports_vllm
    for name, settings in ENGINES.items()
    if name == "server" or "vllm" not in METHODS[method].fixed
]
CASES += [(method, "its own", settings) for method, settings in OF_A_METHOD.items()]
each_case = pytest.mark.parametrize(
    ("method", "settings"), [pytest.param(method, settings, id=f"{method} {name}") for method, name, settings in CASES]
)


def written(held: Candidate, folder: Path) -> Path:
    write_files(launch_files(held), folder, overwrite=False)
    return folder


def parsed(held: Candidate, folder: Path, deprecated: Literal["error", "ignore"] = "ignore") -> argparse.Namespace:
    """The file's settings as the trainer's script gets them, in one namespace.

    `deprecated`: what a setting does that a later release drops.
    """
    import trl
    from trl.scripts.grpo import GRPOScriptArguments

    if not held.method_row.experimental:
        parser = importlib.import_module(f"trl.scripts.{held.method}").make_parser()
    else:
        module = importlib.import_module(f"trl.experimental.{held.method.replace('-', '_')}")
        script = GRPOScriptArguments if "grpo" in held.method_row.script_arguments else trl.ScriptArguments
        without_dtype = make_dataclass(  # as `Model` of an exported train.py
            "Model", [("dtype", ClassVar[str], "auto")], bases=(trl.ModelConfig,)
        )
        model = without_dtype if held.method_row.asynchronous else trl.ModelConfig
        parser = trl.TrlParser((script, getattr(module, held.method_row.config), model))
    with warnings.catch_warnings():
        for category in (FutureWarning, DeprecationWarning):
            warnings.simplefilter(deprecated, category)
        arguments = parser.parse_args_and_config(["--config", str(folder / "train.yaml"), "--use_cpu", "true"])
    return argparse.Namespace(**{name: value for part in arguments for name, value in vars(part).items()})


class TestTheTrainer:
    @each_case
    def test_it_takes_every_setting_of_the_file(
        self, method: MethodName, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # the parser sets it, and the test takes it back
        held = candidate(method, **settings)
        # vLLM bounds transformers below the release here, which has newer names.
        arguments = parsed(held, written(held, tmp_path), "error" if pins_releases(held) else "ignore")
        for name, value in trl_config(held).items():
            if name == "env":
                continue
            if name == "accelerator_config":
                assert arguments.accelerator_config.to_dict().items() >= value.items()
                continue
            assert plain(getattr(arguments, name)) == value, name
        assert arguments.dataset_name == DATASET

    @each_case
    def test_plan_reads_the_same_candidate_from_it(
        self, method: MethodName, settings: dict[str, Any], tmp_path: Path
    ) -> None:
        held = candidate(method, **settings)
        read = candidate_fields(load_train_config(written(held, tmp_path) / "train.yaml").settings, "bfloat16")
        assert read.pop("model") == MODEL.id
        for role in ("reward_model", "teacher_model", "teacher_server_model"):
            if role in read:
                read[role] = load_model(str(read[role]))  # type: ignore[assignment]
        launched = {
            name: getattr(held, name)
            for name in (
                "sharding",
                "num_processes",
                "num_nodes",
                "offload_optimizer",
                "offload_param",
                "dp_replicate_size",
                "cp_size",
                "sp_size",
            )
        }
        of_the_data = {name: getattr(held, name) for name in ("padded", "prompt_length", "vllm_data_parallel_size")}
        unread = {"vllm_max_model_length": held.vllm_max_model_length} if method == "online-dpo" else {}
        assert candidate(method, **{**read, **launched, **of_the_data, **unread}) == held

    def test_no_argument_of_trl_changes_the_dtype_of_adapters(self) -> None:
        with pytest.raises(
            InputError,
            match=r"^TRL's scripts leave autocast_adapter_dtype at PEFT's true, and no argument changes it\. Change .*",
        ):
            launch_files(candidate("sft", tuning="lora", autocast_adapter_dtype=False))

    @pytest.mark.parametrize(("method", "tuning", "task"), [("reward", "lora", "SEQ_CLS"), ("reward", "full", None)])
    def test_peft_is_told_of_a_score_head(self, method: MethodName, tuning: str, task: str | None) -> None:
        """Its default, CAUSAL_LM, stops: a classifier has no `prepare_inputs_for_generation`."""
        held = candidate(method, tuning=tuning)
        assert trl_config(held).get("lora_task_type") == task
        assert ("--lora_task_type SEQ_CLS" in flags(held)) == (task is not None)

    @pytest.mark.parametrize("method", [*SCRIPTED, "ppo"])
    def test_a_method_without_a_command_gets_a_script(self, method: MethodName) -> None:
        files = launch_files(candidate(method))
        names = {node.id for node in ast.walk(ast.parse(files["train.py"])) if isinstance(node, ast.Name)}
        assert {METHODS[method].trainer, METHODS[method].config} <= names
        assert "train.py --config train.yaml" in files["launch.sh"]

    @pytest.mark.parametrize("method", SCRIPTED)
    def test_the_script_hands_its_trainer_what_the_trainer_takes(self, method: MethodName) -> None:
        import inspect

        module = importlib.import_module(f"trl.experimental.{method.replace('-', '_')}")
        trainer, *parents = getattr(module, METHODS[method].trainer).__mro__
        takes = inspect.signature(trainer.__init__).parameters
        if "kwargs" in takes:  # handed to the trainer that it inherits from
            takes = {**takes, **inspect.signature(parents[0].__init__).parameters}
        assert arguments_of(METHODS[method].trainer, launch_files(candidate(method))["train.py"]) <= takes.keys()


class TestReferences:
    """TRL refuses to copy a policy under ZeRO-3 (trl 1.16, experimental/utils.py, `create_reference_model`)."""

    @pytest.mark.parametrize(
        ("settings", "loads"),
        [
            ({"sharding": "zero3"}, True),
            ({"sharding": "zero2"}, False),
            ({"sharding": "zero3", "tuning": "lora"}, False),
        ],
    )
    def test_a_script_loads_the_reference_that_its_trainer_cannot_copy(
        self, settings: dict[str, object], loads: bool
    ) -> None:
        script = launch_files(candidate("online-dpo", num_processes=4, **settings))["train.py"]
        assert ("reference = AutoModelForCausalLM.from_pretrained(" in script) == loads
        assert ("ref_model=reference," in script) == loads

    @pytest.mark.parametrize("method", ["orpo", "cpo", "tpo", "a2po", "online-dpo", "gold", "iw-opd", "sdft", "sdpo"])
    @pytest.mark.parametrize(
        ("model", "loader"),
        [("Qwen2.5-VL-3B-Instruct", "AutoModelForImageTextToText"), ("Qwen2.5-0.5B", "AutoModelForCausalLM")],
    )
    def test_a_script_loads_a_model_with_its_tower(self, method: MethodName, model: str, loader: str) -> None:
        """`AutoModelForCausalLM` refuses Qwen2.5-VL and drops the tower of Qwen3.5."""
        script = launch_files(replace(candidate(method, tuning="lora"), model=load_model(model)))["train.py"]
        assert f"policy = {loader}.from_pretrained(" in script
        assert f"from transformers import {loader}, AutoTokenizer" in script


QLORA_FP16: dict[str, object] = {
    "tuning": "lora",
    "quantization": "nf4",
    "dtype": "float16",
    "precision": "fp16",
}


class Parameter:
    """Stands for a parameter that is not trained."""

    requires_grad = False


class TestColumns:
    @pytest.mark.parametrize("method", ROWS)
    def test_the_readme_names_the_columns_of_the_dataset(self, method: MethodName) -> None:
        """A user of SDFT or TPO had to look for `privileged_context` and `reference` in TRL's pages."""
        asked_for = launch_files(candidate(method))["README.md"].partition("`dataset_name` in train.yaml")[2]
        columns = {column for row in ROWS[method] for column in row}
        assert all(column in asked_for.partition("\n")[0].partition("its columns: ")[2] for column in columns)


class TestFloat32Adapters:
    @pytest.mark.parametrize("method", METHODS_NOW)
    def test_a_script_casts_what_fp16_cannot_unscale(self, method: MethodName) -> None:
        """PEFT's float32 adapters stay in some; ORPO's, CPO's and online DPO's ran so on emulated T4s."""
        files = launch_files(candidate(method, **QLORA_FP16))
        left = method in (
            "orpo", "cpo", "tpo", "async-grpo", "online-dpo", "iw-opd", "async-distillation", "sdft", "sdpo"
        )  # fmt: skip
        assert ("parameter.data = parameter.data.float()" in files["train.py"]) != left
        assert "train.py --config train.yaml" in files["launch.sh"]

    def test_the_cast_leaves_no_variable_that_would_keep_a_parameter_whole(self) -> None:
        """Apertus-8B under FSDP2: the loop's variable held the head, 1 GiB, beside its shards."""
        lines = launch_files(candidate("dpo", **QLORA_FP16))["train.py"].splitlines()
        first = next(number for number, line in enumerate(lines) if "in trainer.model.parameters()" in line)
        kept = next(number for number, line in enumerate(lines) if "trainer.train(" in line)
        found: dict[str, Any] = {"trainer": SimpleNamespace(model=SimpleNamespace(parameters=lambda: [Parameter()]))}
        exec(textwrap.dedent("\n".join(lines[first : kept - 1])), {}, found)
        assert set(found) == {"trainer"}

    @pytest.mark.parametrize("method", [name for name in METHODS_NOW if name not in SCRIPTED])
    def test_the_script_hands_its_trainer_what_trls_own_script_does(self, method: MethodName) -> None:
        module = importlib.import_module(f"trl.scripts.{method}")
        assert module.__file__ is not None
        theirs = arguments_of(METHODS[method].trainer, Path(module.__file__).read_text(encoding="utf-8"))
        ours = arguments_of(METHODS[method].trainer, launch_files(candidate(method, **QLORA_FP16))["train.py"])
        assert ours == theirs

    @pytest.mark.parametrize(("trl", "argument", "owner"), [("1.6", False, "model"), ("1.8", True, "training")])
    def test_an_older_release_takes_the_quantization_as_its_script_gives_it(
        self, trl: str, argument: bool, owner: str
    ) -> None:
        """Source: trl 1.6 and 1.8, scripts/sft.py, `main`. A run of trl 1.6 on the CPU stepped and resumed so."""
        script = launch_files(replace(candidate("sft", **QLORA_FP16), trl_version=trl))["train.py"]
        assert ("quantization_config" in arguments_of("SFTTrainer", script)) == argument
        assert ("get_kbit_device_map()" in script) != argument
        assert f"{owner}.trust_remote_code" in script

    @pytest.mark.parametrize("method", [name for name in METHODS_NOW if METHODS[name].kbit_preparation == "none"])
    def test_a_script_prepares_the_base_as_peft_does(self, method: MethodName) -> None:
        settings = {"tuning": "lora", "quantization": "nf4", "prepare_model_for_kbit_training": True}
        script = launch_files(candidate(method, **settings))["train.py"]
        ast.parse(script)
        assert script.count("prepare_model_for_kbit_training(") == 1
        assert ("AutoModelForSequenceClassification.from_pretrained" in script) == (method == "reward")

    def test_bf16_needs_none(self) -> None:
        assert "train.py" not in launch_files(candidate("sft", **{**QLORA_FP16, "precision": "bf16"}))


class TestDequantizing:
    @pytest.mark.parametrize("method", [method for method in METHODS_NOW if not METHODS[method].asynchronous])
    def test_published_mxfp4_weights_are_dequantized_for_training(self, method: MethodName) -> None:
        held = replace(candidate(method), model=load_model("openai/gpt-oss-20b"))
        files = launch_files(held)
        ast.parse(files["train.py"])
        assert "quantization_config=Mxfp4Config(dequantize=True)" in files["train.py"]
        assert "train.py --config train.yaml" in files["launch.sh"]

    def test_transformers_takes_the_config_for_a_published_checkpoint(self) -> None:
        from transformers import Mxfp4Config
        from transformers.quantizers.auto import AutoHfQuantizer

        published = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
        merged = AutoHfQuantizer.merge_quantization_configs(published, Mxfp4Config(dequantize=True))
        assert (merged.dequantize, merged.modules_to_not_convert) == (True, ["lm_head"])

    def test_other_checkpoints_need_none(self) -> None:
        assert "train.py" not in launch_files(candidate("sft"))


def arguments_of(trainer: str, script: str) -> set[str | None]:
    """Names of the arguments of the only call of `trainer` in a script."""
    (call,) = (
        node
        for node in ast.walk(ast.parse(script))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == trainer
    )
    return {keyword.arg for keyword in call.keywords}


def plain(value: object) -> object:
    """An argument as YAML writes it: an enum by its text."""
    return getattr(value, "value", value)


class TestAccelerate:
    @each_case
    def test_it_reads_the_launch_file(self, method: MethodName, settings: dict[str, Any], tmp_path: Path) -> None:
        from accelerate.commands.config.config_args import load_config_from_file

        held = candidate(method, **settings)
        read = load_config_from_file(str(written(held, tmp_path) / "accelerate.yaml"))
        assert read.num_processes == held.num_processes
        assert read.distributed_type.value == accelerate_config(held)["distributed_type"]

    @pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
    def test_its_launcher_takes_the_file_and_our_command(
        self, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser

        held = candidate("sft", **settings)
        monkeypatch.chdir(written(held, tmp_path))
        arguments = launch_command_parser().parse_args([*launch_command(held, "train.py")[2:], "--max_steps", "2"])
        launched, _, _ = _validate_launch_command(arguments)
        assert (launched.num_processes, launched.training_script, launched.training_script_args) == (
            held.num_processes,
            "train.py",
            ["--max_steps", "2"],
        )
        assert (launched.use_deepspeed, launched.use_fsdp) == (
            held.sharding.startswith("zero"),
            held.sharding == "fsdp2",
        )

    def test_fsdp_names_the_classes_of_a_model_whose_own_list_has_others(self) -> None:
        held = replace(candidate("sft", num_processes=2, sharding="fsdp2"), model=load_model("gemma-3-4b-pt"))
        section = accelerate_config(held)["fsdp_config"]
        wrapped = "Gemma3DecoderLayer,SiglipEncoderLayer,SiglipVisionEmbeddings"
        assert section["fsdp_transformer_layer_cls_to_wrap"] == wrapped
        assert section["fsdp_cpu_ram_efficient_loading"] is True

    @pytest.mark.parametrize("model", ["gemma-4-E2B", "Qwen2.5-0.5B-Instruct-GPTQ-Int4"])
    def test_fsdp_does_not_send_a_model_with_saved_buffers_from_one_process(self, model: str) -> None:
        """A start of a GPTQ base stopped: "'Tensor' object has no attribute 'device_mesh'"."""
        held = replace(candidate("sft", num_processes=2, sharding="fsdp2"), model=load_model(model))
        assert accelerate_config(held)["fsdp_config"]["fsdp_cpu_ram_efficient_loading"] is False

    def test_fsdp_is_version_2(self, tmp_path: Path) -> None:
        config = yaml.safe_load(launch_files(candidate("sft", **VARIANTS["fsdp2"]))["accelerate.yaml"])
        assert (config["fsdp_config"]["fsdp_version"], config["fsdp_config"]["fsdp_offload_params"]) == (2, True)

    def test_with_a_deepspeed_file_nothing_is_said_twice(self) -> None:
        config = accelerate_config(candidate("sft", **VARIANTS["zero3"]))
        assert "mixed_precision" not in config
        assert config["deepspeed_config"] == {
            "deepspeed_config_file": "deepspeed.json", "deepspeed_multinode_launcher": "standard",
            "zero3_init_flag": True,
        }  # fmt: skip


class TestDeepSpeed:
    @pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
    def test_transformers_fills_in_the_buckets_that_the_estimate_counts(self, sharding: str, tmp_path: Path) -> None:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
        import trl
        from transformers import AutoConfig
        from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

        held = candidate("sft", num_processes=2, sharding=sharding)
        filled = HfTrainerDeepSpeedConfig(str(written(held, tmp_path) / "deepspeed.json"))
        arguments = trl.SFTConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none")
        filled.trainer_config_process(arguments)
        fields = dict(MODEL.config)
        model = argparse.Namespace(config=AutoConfig.for_model(str(fields.pop("model_type")), **fields))
        filled.trainer_config_finalize(arguments, model, 10)
        zero = filled.config["zero_optimization"]
        assert zero["reduce_bucket_size"] == MODEL.hidden_size**2
        assert zero.get("stage3_param_persistence_threshold", 10 * MODEL.hidden_size) == 10 * MODEL.hidden_size
        assert "auto" not in json.dumps(zero)

    def test_accelerate_takes_the_file(self, tmp_path: Path) -> None:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
        from accelerate import DeepSpeedPlugin

        plugin = DeepSpeedPlugin(
            hf_ds_config=str(written(candidate("sft", **VARIANTS["zero3"]), tmp_path) / "deepspeed.json")
        )
        assert plugin.zero_stage == 3
        assert plugin.hf_ds_config.is_offload()

    def test_offloading_goes_to_the_host(self) -> None:
        zero = deepspeed_config(candidate("sft", num_processes=2, sharding="zero3", offload_optimizer=True))[
            "zero_optimization"
        ]
        assert isinstance(zero, dict)
        assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": True}
        assert "offload_param" not in zero

    def test_another_optimizer_on_the_host_than_adam_is_said_to_be_meant(self) -> None:
        held = candidate("sft", num_processes=2, sharding="zero2", offload_optimizer=True)
        assert "zero_force_ds_cpu_optimizer" not in deepspeed_config(held)
        assert deepspeed_config(replace(held, optim="adafactor"))["zero_force_ds_cpu_optimizer"] is False

    def test_nothing_without_it(self) -> None:
        assert deepspeed_config(candidate("sft")) == {}


class TestCommands:
    def test_a_method_with_a_command_is_run_by_trl(self) -> None:
        assert launch_command(candidate("grpo")) == [
            "trl",
            "grpo",
            "--config",
            "train.yaml",
            "--accelerate_config",
            "accelerate.yaml",
        ]

    def test_a_script_is_run_by_accelerate_in_as_many_processes(self) -> None:
        held = candidate("grpo", num_processes=4, sharding="ddp")
        assert launch_command(held, "worker.py") == [
            "accelerate",
            "launch",
            "--config_file",
            "accelerate.yaml",
            "--num_processes",
            "4",
            "worker.py",
        ]
        assert launch_command(held, "w.py", ("python", "-m", "x"))[:3] == ["python", "-m", "x"]

    def test_the_server_takes_its_arguments(self) -> None:
        from trl.scripts.vllm_serve import make_parser

        (read,) = make_parser().parse_args_and_config(server_command(candidate("grpo", **ENGINES["server"]))[2:])
        assert (read.model, read.tensor_parallel_size, read.data_parallel_size, read.max_model_len) == (
            MODEL.id,
            2,
            1,
            1024,
        )

    def test_server_and_trainer_have_cards_of_their_own(self) -> None:
        script = launch_files(candidate("grpo", **ENGINES["server"]))["launch.sh"]
        assert "CUDA_VISIBLE_DEVICES=6,7 trl vllm-serve" in script
        assert "CUDA_VISIBLE_DEVICES=0,1,2,3,4,5 trl grpo" in script

    @pytest.mark.parametrize(("processes", "sees"), [(1, True), (2, False)])
    def test_one_process_sees_one_of_several_cards(self, processes: int, sees: bool) -> None:
        held = candidate("sft", num_processes=processes, sharding="none" if processes == 1 else "ddp")
        assert ('CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-0}" trl' in launch_files(held)["launch.sh"]) == sees

    def test_without_a_server_there_is_no_command_for_one(self) -> None:
        assert server_command(candidate("grpo")) == []

    def test_on_several_nodes_a_server_has_the_last_one(self) -> None:
        files = launch_files(
            candidate("grpo", num_nodes=2, vllm="server", vllm_tensor_parallel_size=8, num_processes=8, sharding="ddp")
        )
        assert yaml.safe_load(files["accelerate.yaml"])["num_machines"] == 1
        assert "#SBATCH --nodes=2" in files["slurm.sh"]
        assert '--vllm_server_host "$2"' in files["slurm.sh"]

    def test_processes_that_the_nodes_cannot_share_evenly_are_refused(self) -> None:
        message = r"^num_processes 15 is not the same number on each of 2 nodes\. Use num_processes=14\.$"
        with pytest.raises(InputError, match=message):
            launch_files(candidate("sft", num_nodes=2, num_processes=15, sharding="ddp"))

    @pytest.mark.parametrize(
        "settings",
        [
            {},
            ENGINES["server"],
            VARIANTS["fsdp2"],
            {"num_nodes": 2, "num_processes": 8, "sharding": "ddp", "vllm": "server"},
        ],
    )
    def test_the_scripts_are_shell(self, settings: dict[str, Any], tmp_path: Path) -> None:
        files = launch_files(candidate("grpo", **settings))
        for name in ("launch.sh", "slurm.sh"):
            if name in files:
                subprocess.run(["bash", "-n"], input=files[name], text=True, check=True)
                assert shlex.join(launch_command(candidate("grpo", **settings))[:2]) in files[name]


class TestTorchrun:
    @pytest.mark.parametrize("name", [name for name in VARIANTS if "parallel" not in name and "hybrid" not in name])
    def test_train_yaml_has_the_sharding(self, name: str) -> None:
        held = candidate("sft", **VARIANTS[name])
        files = launch_files(held, "torchrun")
        assert "accelerate.yaml" not in files
        assert yaml.safe_load(files["train.yaml"]).items() >= (trl_config(held) | sharding_settings(held)).items()

    def test_deepspeed_is_set_up_from_the_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")  # the parser sets it, and the test takes it back
        write_files(launch_files(candidate("sft", **VARIANTS["zero3"]), "torchrun"), tmp_path, overwrite=False)
        monkeypatch.chdir(tmp_path)
        plugin = parsed(candidate("sft", **VARIANTS["zero3"]), tmp_path).deepspeed_plugin
        assert (plugin.zero_stage, plugin.zero3_init_flag) == (3, True)

    @pytest.mark.parametrize(
        ("model", "offload"), [("Qwen2.5-7B", True), ("Qwen2.5-7B", False), ("gemma-3-4b-pt", True)]
    )
    def test_fsdp_is_set_up_as_by_accelerates_launcher(
        self, model: str, offload: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from accelerate import FullyShardedDataParallelPlugin
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser
        from accelerate.utils.launch import prepare_multi_gpu_env

        sharded = candidate("sft", num_processes=2, sharding="fsdp2", offload_param=offload)
        held = replace(sharded, model=load_model(model))
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "FSDP_CPU_RAM_EFFICIENT_LOADING"):
            monkeypatch.setenv(name, "")
        write_files(launch_files(held, "torchrun"), tmp_path / "torchrun", overwrite=False)
        ours = FullyShardedDataParallelPlugin(**parsed(held, tmp_path / "torchrun").fsdp_plugin_args)
        monkeypatch.chdir(written(held, tmp_path / "accelerate"))
        launched = launch_command_parser().parse_args(launch_command(held, "train.py")[2:])
        for name, value in prepare_multi_gpu_env(_validate_launch_command(launched)[0]).items():
            monkeypatch.setenv(name, value)
        assert vars(ours) == vars(FullyShardedDataParallelPlugin())

    def test_one_process_is_started_by_python(self) -> None:
        assert (
            '\nCUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-0}" python -m trl.scripts.sft --config train.yaml "$@"'
            in (launch_files(candidate("sft"), "torchrun")["launch.sh"])
        )

    @pytest.mark.parametrize("settings", [VARIANTS["zero3"], VARIANTS["fsdp2"], ENGINES["server"]])
    def test_it_takes_the_arguments_of_the_scripts(self, settings: dict[str, Any]) -> None:
        from torch.distributed.run import get_args_parser

        files = launch_files(candidate("grpo", **settings), "torchrun")
        (line,) = (line for line in (files.get("launch.sh") or files["slurm.sh"]).splitlines() if "torchrun --" in line)
        read = get_args_parser().parse_args(shlex.split(line.partition("torchrun ")[2]))
        assert int(read.nproc_per_node) * int(read.nnodes.partition(":")[0]) == settings["num_processes"]
        assert (read.module, read.training_script) == (True, "trl.scripts.grpo")
        assert read.training_script_args[:2] == ["--config", "train.yaml"]

    @pytest.mark.parametrize("name", ["context parallel", "sequence parallel"])
    def test_shared_rows_need_accelerate(self, name: str) -> None:
        with pytest.raises(
            InputError, match=r"^cp_size, sp_size and dp_replicate_size .* Use --launcher accelerate\.$"
        ):
            launch_files(candidate("sft", **VARIANTS[name]), "torchrun")


QLORA: dict[str, Any] = {"tuning": "lora", "quantization": "nf4"}
# One candidate of each package that requirements.txt can name, and of each release.
INSTALLED: dict[str, Candidate] = {
    **{row.package: candidate("sft", optim=name) for name, row in OPTIMIZERS.items() if row.package},
    **{f"trl {trl}": replace(candidate("sft"), trl_version=trl) for trl in ("1.0", "1.4", "1.8", "1.12", "1.15")},
    **{f"torch {torch}": candidate("sft", torch_version=torch) for torch in TORCH_VERSIONS},
    "FlashAttention": candidate("sft", attn_implementation="flash_attention_2"),
    "Liger": candidate("sft", use_liger_kernel=True),
    "DeepSpeed": candidate("sft", tuning="lora", num_processes=4, sharding="zero3"),
    "QLoRA, DeepSpeed, FlashAttention": candidate(
        "sft", **QLORA, num_processes=4, sharding="zero2", attn_implementation="flash_attention_2"
    ),
    "images": replace(candidate("sft"), images_per_row=1),
    "GPTQ": replace(candidate("sft", tuning="lora"), model=load_model(GPTQ), quantization="gptq"),
    "AWQ": replace(candidate("sft", tuning="lora"), model=load_model(AWQ), quantization="awq"),
    "engine": candidate("grpo", **ENGINES["colocate"]),
    "engine of a 4-bit base": candidate("grpo", **ENGINES["colocate"], **QLORA),
    "server, FlashAttention": candidate("grpo", **ENGINES["server"], attn_implementation="flash_attention_2"),
}


class TestRequirements:
    @pytest.mark.parametrize(
        ("settings", "wanted"),
        [
            ({}, {"trl==1.16.*", "transformers==5.23.*", "accelerate==1.15.*"}),
            ({"torch_version": "2.14"}, {"torch==2.14.*"}),
            ({"tuning": "lora", "quantization": "nf4"}, {"peft==0.21.*", "bitsandbytes==0.50.*"}),
            ({"optim": "paged_adamw_8bit"}, {"bitsandbytes==0.50.*"}),
            ({"optim": "adamw_torch_8bit"}, {"torchao"}),
            ({"sharding": "zero3", "num_processes": 2}, {"deepspeed==0.19.*"}),
            ({"attn_implementation": "flash_attention_2"}, {"transformers[kernels]>=5.22,<5.24", "torch==2.13.*"}),
        ],
    )
    def test_they_name_what_the_candidate_needs(self, settings: dict[str, Any], wanted: set[str]) -> None:
        assert wanted <= set(launch_files(candidate("sft", **settings))["requirements.txt"].splitlines())

    def test_vllm_has_its_own_bounds(self) -> None:
        lines = launch_files(candidate("grpo", **ENGINES["colocate"]))["requirements.txt"].splitlines()
        assert lines[:4] == ["trl[vllm]==1.16.*", "torch", "datasets", "transformers"]

    def test_a_colocated_engine_of_a_4_bit_base_needs_a_vllm_with_bitsandbytes(self) -> None:
        quantized = {"tuning": "lora", "quantization": "nf4"}
        for engine, needed in (("colocate", True), ("server", False)):
            lines = launch_files(candidate("grpo", **ENGINES[engine], **quantized))["requirements.txt"].splitlines()
            assert ("vllm==0.27.*" in lines) == needed

    @pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3"])
    def test_flash_attention_is_never_built(self, attention: str) -> None:
        assert "flash-attn" not in launch_files(candidate("sft", attn_implementation=attention))["requirements.txt"]

    def test_the_pinned_releases_are_those_that_the_tests_run_with(self) -> None:
        constraints = (Path(__file__).parents[1] / "constraints.txt").read_text(encoding="utf-8")
        for package, release in RELEASES.items():
            assert f"\n{package}=={release.removesuffix('*')}" in constraints

    @pytest.mark.nightly
    @pytest.mark.parametrize("held", INSTALLED.values(), ids=INSTALLED)
    def test_pip_resolves_them_in_a_fresh_environment(self, held: Candidate, tmp_path: Path) -> None:
        venv.create(tmp_path / "fresh", with_pip=True)
        install = [tmp_path / "fresh" / "bin" / "pip", "install", "--quiet", "--dry-run"]
        if subprocess.run([*install, "--no-deps", "trl"], capture_output=True).returncode:
            pytest.skip("no package index can be reached")
        path = tmp_path / "requirements.txt"
        path.write_text(launch_files(held)["requirements.txt"], encoding="utf-8")
        done = subprocess.run([*install, "-r", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    def test_a_method_that_has_left_pins_the_last_release_that_has_it(self) -> None:
        assert launch_files(candidate("ppo"))["requirements.txt"].startswith("trl==1.12.*\n")


class TestHostThreads:
    """`accelerate launch` and torchrun give each process one OpenMP thread, in which Adam on the host would run."""

    @pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
    @pytest.mark.parametrize(("told", "expected"), [({}, 24), ({"OMP_NUM_THREADS": "3"}, 3)])
    def test_an_offloaded_optimizer_gets_the_cores_of_its_node(
        self, launcher: Launcher, told: dict[str, str], expected: int
    ) -> None:
        held = candidate("sft", num_processes=8, sharding="zero2", offload_optimizer=True)
        (line,) = (line for line in launch_script(held, launcher).splitlines() if "OMP_NUM_THREADS" in line)
        shell = f"nproc() {{ echo 190; }}; {line}; echo $OMP_NUM_THREADS"  # 190 threads, 8 processes
        done = subprocess.run(["bash", "-c", shell], env=told, capture_output=True, text=True, check=True)
        assert int(done.stdout) == expected

    def test_processes_of_one_node_share_its_cores(self) -> None:
        held = candidate("sft", num_processes=16, num_nodes=2, sharding="zero2", offload_optimizer=True)
        assert "/ 8)" in slurm_script(held)

    def test_other_runs_keep_the_launchers_default(self) -> None:
        held = candidate("sft", num_processes=8, sharding="zero2")
        assert "OMP_NUM_THREADS" not in launch_script(held) + slurm_script(held)


class TestExport:
    def test_every_file_is_in_the_readme(self, tmp_path: Path) -> None:
        paths = write_files(
            launch_files(candidate("online-dpo", **VARIANTS["zero2"])), tmp_path / "run", overwrite=False
        )
        page = (tmp_path / "run" / "README.md").read_text()
        assert {path.name for path in paths} == {path.name for path in (tmp_path / "run").iterdir()}
        assert all(f"`{path.name}`" in page for path in paths if path.name != "README.md")

    @pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.learning_rate])
    def test_the_readme_states_trls_own_learning_rate(self, method: MethodName) -> None:
        row = METHODS[method]
        config = getattr(importlib.import_module(row.module), row.config)
        assert float(row.learning_rate) == config.__dataclass_fields__["learning_rate"].default

    def test_the_readme_says_that_lora_wants_a_higher_learning_rate(self) -> None:
        assert "10 times" in launch_files(candidate("dpo", tuning="lora"))["README.md"]
        assert "10 times" not in launch_files(candidate("dpo", tuning="full"))["README.md"]

    def test_a_teacher_that_nobody_named_is_said(self):
        said = "no teacher was named"
        student = candidate("gkd").model
        assert said in launch_files(candidate("gkd", teacher_model=student))["README.md"]
        assert said not in launch_files(candidate("gkd", teacher_model=load_model("Qwen2.5-1.5B")))["README.md"]

    def test_the_readme_is_in_start_order(self) -> None:
        page = launch_files(candidate("grpo"))["README.md"]
        steps = ["FILL IN", "dataset_name", "rewards.py", "pip install -r requirements.txt", "bash launch.sh"]
        steps += ["resume_from_checkpoint: true"]
        assert sorted(steps, key=page.index) == steps

    def test_what_cannot_resume_names_no_resume(self) -> None:
        whole = {"tuning": "lora", "quantization": "nf4", "num_processes": 2, "sharding": "fsdp2"}
        assert "resume_from_checkpoint" not in launch_files(candidate("ppo"))["README.md"]
        assert "resume_from_checkpoint" not in launch_files(candidate("sft", **whole))["README.md"]

    def test_an_evaluation_names_its_split(self) -> None:
        evaluated = replace(candidate("sft"), eval_strategy="steps")
        assert "with a split `test` (or `dataset_test_split`)" in launch_files(evaluated)["README.md"]
        assert "split" not in launch_files(candidate("sft"))["README.md"]

    def test_the_reward_model_of_ppo_is_to_be_filled_in(self) -> None:
        files = launch_files(candidate("ppo"))
        (line,) = (line for line in files["train.yaml"].splitlines() if line.startswith("reward_model_path"))
        assert line.endswith("# FILL IN")
        assert "reward_model_path" in files["README.md"].split("Install:")[0]
        assert (
            "reward_model_path: Qwen/Qwen2.5-1.5B\n"
            in launch_files(candidate("ppo", reward_model=REWARD))["train.yaml"]
        )

    def test_skypilot_asks_for_the_gpus_of_trainer_and_server(self) -> None:
        task = yaml.safe_load(launch_files(candidate("grpo", **ENGINES["server"]))["sky.yaml"])
        assert (task["resources"]["accelerators"], task["run"]) == ("GPU:8", "bash launch.sh")

    def test_what_the_user_has_changed_stays(self, tmp_path: Path) -> None:
        held = candidate("sft")
        write_files(launch_files(held), tmp_path, overwrite=False)
        write_files(launch_files(held), tmp_path, overwrite=False)  # the same file again is no change
        (tmp_path / "train.yaml").write_text("mine")
        with pytest.raises(
            InputError,
            match=r"^\S*train\.yaml, \S*README\.md would be overwritten and say something else\. Use --overwrite\.$",
        ):
            write_files(launch_files(replace(held, max_length=2048)), tmp_path, overwrite=False)
        assert (tmp_path / "train.yaml").read_text() == "mine"
        assert "max_length=1024" in (tmp_path / "README.md").read_text()

    def test_unless_it_is_told(self, tmp_path: Path) -> None:
        write_files(launch_files(candidate("sft")), tmp_path, overwrite=False)
        write_files(launch_files(candidate("sft", max_length=2048)), tmp_path, overwrite=True)
        assert "max_length: 2048" in (tmp_path / "train.yaml").read_text()

    def test_the_same_candidate_gives_the_same_bytes(self) -> None:
        assert launch_files(candidate("grpo", **ENGINES["server"])) == launch_files(
            candidate("grpo", **ENGINES["server"])
        )


class TestTeacherServer:
    def test_the_files_say_where_the_teacher_is_and_what_its_client_needs(self) -> None:
        """TRL's client stops without vLLM, and the config without the server's address."""
        files = launch_files(candidate("server-distillation"))
        assert "teacher_model_server_url: http://localhost:8000" in files["train.yaml"]
        assert "trl vllm-serve --model TEACHER --port 8000" in files["README.md"]
        assert "trl[vllm]" in files["requirements.txt"]

    @pytest.mark.parametrize("method", ["gold", "iw-opd", "server-distillation"])
    def test_a_server_that_samples_listens_where_its_trainer_looks(self, method: MethodName) -> None:
        """Their `vllm_server_port` is 8001 by default."""
        served = candidate(method, vllm="server")
        assert "--port 8001" in launch_script(served)
