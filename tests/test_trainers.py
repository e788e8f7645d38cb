"""Contract of `TRAINERS`: each method of the newest TRL has its trainer, with the training arguments of a probe."""

import importlib
import math
import pkgutil
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import asdict, replace

from planner.candidate import Candidate
from planner.errors import InputError, UnknownArchitecture
from planner.jobs.base_candidate import trl_version
from planner.jobs.job import Job
from planner.jobs.settings import ROUTER_LOSS_CONFIGS, trl_arguments
from planner.methods import METHODS, Method, MethodName, method_of_config
from planner.models.architectures.table import architecture_of
from planner.models.catalogue import load_model, model_rows
from planner.rows.packing import tree_paths, tree_samples, tree_tokens

pytest.importorskip("trl")

from peft import get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM
from trl import ModelConfig, get_peft_config

from planner.launch.trl_config import trl_config
from planner.models.lora_targets import read_targets
from probes.step.rollouts import NoServer
from probes.task import Task
from probes.trainers import TRAINERS, model_config, set_full_length, training_arguments, transformers_config
from probes.worker.workload import trainer_inputs as probe_inputs
from probes.worker.workload import trainer_of_task
from probes.worker.worst_batch import dataset_of

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

MODEL = load_model(str(Path(__file__).parent / "models" / "tiny-llama"))


def test_a_probe_of_a_trainer_that_left_trl_names_the_release_that_has_it(tmp_path: Path) -> None:
    task = Task(candidate=Candidate(model=MODEL, method="ppo"), device="cpu", folder=str(tmp_path))
    with pytest.raises(InputError, match=r"^TRL .* has no trainer for ppo: probe it where TRL 1\.12 is\.$"):
        trainer_of_task(task, {})


def trainers_of_trl() -> list[type]:
    """Every trainer that `trl` and the packages of `trl.experimental` export."""
    import trl
    import trl.experimental

    names = [f"trl.experimental.{package.name}" for package in pkgutil.iter_modules(trl.experimental.__path__)]
    modules = [trl, *(importlib.import_module(name) for name in names)]
    exported = [getattr(module, name) for module in modules for name in dir(module) if "Trainer" in name]
    return [trainer for trainer in dict.fromkeys(exported) if trainer.__module__.startswith("trl.")]


def config_of(trainer: type) -> type:
    """The config class of a trainer of TRL, which is exported beside it."""
    name = trainer.__name__.replace("Trainer", "Config")
    module = importlib.import_module(trainer.__module__.rpartition(".")[0])
    return getattr(module, name, None) or getattr(importlib.import_module("trl"), name)  # type: ignore[no-any-return]


def test_every_trainer_of_trl_is_a_method() -> None:
    planned = {row.trainer: row.name for row in METHODS.values()}
    found = trainers_of_trl()
    assert len(found) >= 20
    for trainer in found:
        assert method_of_config(config_of(trainer), "") == planned[trainer.__name__]


def test_a_config_of_one_s_own_has_the_method_of_trl_s_that_it_inherits_from() -> None:
    from trl import SFTConfig
    from trl.experimental.gold import GOLDConfig

    assert method_of_config(type("OwnConfig", (SFTConfig,), {}), "") == "sft"
    assert method_of_config(type("OwnConfig", (GOLDConfig,), {}), "") == "gold"  # and not sft, whose config it extends


def test_a_config_of_a_trainer_that_a_later_trl_has_is_not_taken_for_the_one_it_inherits_from() -> None:
    from trl import GRPOConfig

    later = type("LaterConfig", (GRPOConfig,), {"__module__": "trl.experimental.later"})
    with pytest.raises(InputError, match=r"^LaterConfig is no config of a TRL method that is planned"):
        method_of_config(later, "")


def test_a_setting_that_the_config_has_no_field_for_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    candidate = Candidate(model=MODEL, method="grpo", num_generations=2)
    settings_later = trl_arguments(candidate) | {"setting_of_a_later_trl": 1}
    monkeypatch.setattr("probes.trainers.trl_arguments", lambda candidate: settings_later)
    with pytest.raises(InputError, match=r"^GRPOConfig of the installed TRL has no setting setting_of_a_later_trl\.$"):
        training_arguments(probe_inputs(Task(candidate=candidate, device="cpu", folder=str(tmp_path)), {}))


@pytest.mark.parametrize(
    "changes",
    [
        {"sharding": "fsdp2", "num_nodes": 2, "num_processes": 4, "dp_replicate_size": 2},
        {"method": "online-dpo", "vllm": "server", "vllm_max_model_length": 96},
        *({"method": method, "vllm": "server"} for method in ("grpo", "rloo", "gkd", "distillation")),
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_a_candidate_that_the_search_offers_has_training_arguments(changes: dict[str, Any], tmp_path: Path) -> None:
    settings = {"method": "sft", "tuning": "full", "max_length": 64, "prompt_length": 8, "max_completion_length": 8}
    candidate = Candidate(model=MODEL, **(settings | changes))
    task = Task(candidate=candidate, device="cpu", folder=str(tmp_path))
    assert training_arguments(probe_inputs(task, {})).per_device_train_batch_size == 8


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"optim": "galore_adamw"}, {"optim": "apollo_adamw"}, {"attn_implementation": "eager"},
        {"method": "grpo", "num_generations": 2, "beta": 0.1}, {"sharding": "fsdp2", "sync_each_batch": True},
        {"model": load_model("google/gemma-4-E2B")}, {"use_liger_kernel": True, "method": "dpo", "beta": 0.1},
        {"method": "distillation", "beta": 0.5, "teacher_model": load_model("gemma-2-2b"), "teacher_dtype": "bfloat16"},
    ],
    ids=str,
)  # fmt: skip
def test_a_probe_gives_its_trainer_every_argument_of_the_exported_file(changes: dict[str, Any], tmp_path: Path) -> None:
    candidate = Candidate(**{"model": MODEL, "method": "sft", "max_length": 64} | changes)
    inputs = probe_inputs(Task(candidate=candidate, device="cpu", folder=str(tmp_path)), {})
    given, written = vars(training_arguments(inputs)), trl_config(candidate)
    own = {"model_name_or_path", "teacher_model_name_or_path", "teacher_model_init_kwargs", "max_steps"}
    missing = {name for name in written.keys() - own if name in given and given[name] != written[name]}
    assert missing - {"accelerator_config", "activation_checkpointing_kwargs"} == set()
    assert given["model_init_kwargs"]["attn_implementation"] == written.get("attn_implementation")


@pytest.mark.parametrize(
    ("targets", "given_to_peft"),
    [
        (("all-linear",), "all-linear"),
        (("default",), None),
        (("q_proj",), ["q_proj"]),
        (("k_proj", "v_proj"), ["k_proj", "v_proj"]),
    ],
)
def test_target_modules_are_names_and_not_a_regular_expression(targets: tuple[str, ...], given_to_peft: object) -> None:
    candidate = Candidate(model=MODEL, method="sft", tuning="lora", lora_target_modules=targets)
    assert model_config(candidate).lora_target_modules == given_to_peft


def test_a_config_with_an_infinity_is_read_as_transformers_reads_it() -> None:
    config = {"model_type": "granitemoehybrid", "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    assert tuple(transformers_config(config).time_step_limit) == (0.0, math.inf)
    with pytest.raises(UnknownArchitecture, match=r"^Transformers refuses the config\.json of type granitemoehybrid"):
        transformers_config(config | {"time_step_limit": "long"})


# -- the table of methods ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [name for name in TRAINERS if METHODS[name].last_trl == "current"])
class TestColumnsOfMethods:
    def test_the_dropout_is_that_of_the_config(self, method: MethodName) -> None:
        defaults = {field.name: field.default for field in fields(config_class(method))}
        assert METHODS[method].disables_dropout == defaults.get("disable_dropout", False)

    def test_the_config_has_the_methods_own_names_and_lacks_the_missing_ones(self, method: MethodName) -> None:
        row, names = METHODS[method], {field.name for field in fields(config_class(method))}
        assert set(row.argument_names.values()) <= names
        assert not row.missing_arguments & names

    def test_the_trainer_is_in_its_module(self, method: MethodName) -> None:
        row = METHODS[method]
        assert row.trainer in vars(importlib.import_module(row.trainer_module))


def config_class(method: MethodName) -> Any:
    return getattr(importlib.import_module(METHODS[method].module), METHODS[method].config)


@pytest.mark.parametrize("column", ["loss", "reference", "generates", "learning_rate", "disables_dropout"])
def test_a_row_without_a_column_cannot_be_made(column: str) -> None:
    columns = {name: value for name, value in asdict(METHODS["grpo"]).items() if name != column}
    with pytest.raises(TypeError, match=column):
        Method(**columns)


@pytest.mark.parametrize(
    ("method", "wanted", "planned"),
    [("gmpo", "1.3", "1.7"), ("gmpo", "1.14", "1.14"), ("ppo", "1.16", "1.12"), ("ppo", "1.3", "1.3")],
)
def test_a_method_is_planned_for_a_release_that_has_it(method: MethodName, wanted: str, planned: str) -> None:
    assert trl_version(Job(model=MODEL, method=method, trl_version=wanted)) == planned


def test_rows_whose_reference_is_precomputed_are_on_disk_where_all_processes_read(tmp_path: Path) -> None:
    """A probe of two processes stopped: each looked in a temporary folder of its own for the first one's results."""
    settings = {"method": "dpo", "tuning": "full", "max_length": 64, "precompute_ref_log_probs": True}
    task = Task(candidate=Candidate(model=MODEL, **settings), device="cpu", folder=str(tmp_path))  # type: ignore[arg-type]
    rows = [{"prompt": [1], "chosen": [2], "rejected": [3]}]
    found = dataset_of(rows, "train", task)
    assert found.to_list() == rows
    assert [Path(file["filename"]).parent for file in found.cache_files] == [tmp_path / "train"]
    beside = replace(task, candidate=replace(task.candidate, precompute_ref_log_probs=False))
    assert not dataset_of(rows, "train", beside).cache_files


def test_the_router_loss_is_off_where_trl_stops_at_it() -> None:
    """Of the catalogue's model types those that return router logits and have no `num_experts` in their config."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    configs = {model.model_type: model.config for row in model_rows() for model in (load_model(row.id),)}
    texts = {name: CONFIG_MAPPING[name].from_dict(dict(config)).get_text_config() for name, config in configs.items()}
    assert {
        name
        for name, text in texts.items()
        if getattr(text, "router_aux_loss_coef", 0) and hasattr(text, "output_router_logits")
        if not hasattr(text, "num_experts")
    } == {name for name in configs if architecture_of(name).stops_at_router_loss}


def test_each_config_with_a_coefficient_of_the_router_loss_is_known() -> None:
    today = [method for method, row in METHODS.items() if row.last_trl == "current"]
    held = {METHODS[method].config for method in today if hasattr(config_class(method), "router_aux_loss_coef")}
    assert held == ROUTER_LOSS_CONFIGS


@pytest.mark.parametrize(
    ("method", "version", "coefficient"),
    [("sft", "1.16", 0.0), ("grpo", "1.16", 0.0), ("gkd", "1.16", 0.0), ("sft", "1.14", None), ("orpo", "1.16", None)],
)
def test_a_coefficient_turns_the_router_loss_off(method: MethodName, version: str, coefficient: float | None) -> None:
    granite = load_model("ibm-granite/granite-4.0-h-micro")
    candidate = Candidate(model=granite, method=method, trl_version=version)
    assert trl_arguments(candidate).get("router_aux_loss_coef") == coefficient
    assert "router_aux_loss_coef" not in trl_arguments(replace(candidate, model=MODEL))


def test_a_single_target_reaches_its_modules_through_trls_parser() -> None:
    """TRL makes a string of a list of one, and PEFT matches a string with whole paths: `q_proj` would reach nothing."""
    held = Candidate(
        model=load_model("Qwen2.5-0.5B"), method="sft", tuning="lora", lora_target_modules=("q_proj",), dtype="bfloat16"
    )
    config = ModelConfig(use_peft=True, lora_target_modules=trl_config(held)["lora_target_modules"])
    shape = AutoConfig.for_model(
        "qwen2", hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=32,
    )  # fmt: skip
    adapted = get_peft_model(AutoModelForCausalLM.from_config(shape), get_peft_config(config))
    reached = [name for name, _ in adapted.named_modules() if name.endswith("lora_A")]
    assert len(reached) == 2
    assert all("q_proj" in name for name in reached)
    assert read_targets(held.model, tuple(trl_config(held)["lora_target_modules"])) == ("q_proj",)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore::trl.import_utils.TRLExperimentalWarning")
@pytest.mark.parametrize(("samples", "group"), [(1, 8), (3, 8), (8, 8), (11, 4)])
def test_a_packed_row_of_async_grpo_has_the_tokens_of_trls_tree(samples: int, group: int) -> None:
    from trl.experimental.async_grpo.packing import TreeRow

    prompt, completion, row = 12, 5, TreeRow()
    for index in range(samples):
        tokens = [*range(prompt - 1), 100 + index // group, *range(1000 + 10 * index, 1000 + 10 * index + completion)]
        tokens[0] += 200 * (index // group)  # prompts of different groups share nothing
        mask = [0] * prompt + [1] * completion
        row.add({
            "input_ids": torch.tensor(tokens), "completion_mask": torch.tensor(mask), "advantage": 1.0,
            "old_log_probs": torch.zeros(prompt + completion), "group_id": index // group,
        })  # fmt: skip
    packed = row.pack()
    assert tree_tokens(samples, group, prompt, completion) == packed["input_ids"].numel()
    assert tree_paths(samples, group, prompt, completion) == packed["tree_kv_index"].numel()
    assert samples * completion == packed["token_index"].numel() == (packed["shift_labels"] >= 0).sum()
    assert tree_samples(tree_tokens(samples, group, prompt, completion), group, prompt, completion) == samples


@pytest.mark.filterwarnings("ignore::trl.import_utils.TRLExperimentalWarning")
def test_trl_sends_adapters_alone_to_a_server_with_the_slots_of_the_plan() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOConfig, select_adapter_sync

    held = Candidate(model=load_model("Qwen2.5-0.5B"), method="async-grpo", tuning="lora", lora_r=24)
    shape = AutoConfig.for_model("qwen2", hidden_size=8, intermediate_size=16, num_hidden_layers=1, vocab_size=32,
                                 num_attention_heads=2, num_key_value_heads=2)  # fmt: skip
    adapted = get_peft_model(AutoModelForCausalLM.from_config(shape), get_peft_config(model_config(held)))
    arguments = AsyncGRPOConfig(output_dir="unused", use_cpu=True, bf16=False, max_staleness=held.max_staleness)
    assert select_adapter_sync(NoServer(held).get_server_info(), adapted, arguments)
    assert held.adapter_slots == (32, held.max_staleness + 2)
    with pytest.raises(ValueError, match="Restart the server with `--max-loras 6`"):
        fewer = replace(held, max_staleness=held.max_staleness - 1)
        select_adapter_sync(NoServer(fewer).get_server_info(), adapted, arguments)


@pytest.mark.parametrize("vllm", ["off", "colocate"])
def test_a_trainer_without_generation_kwargs_samples_full_lengths_with_and_without_an_engine(vllm: Any) -> None:
    """A probe of GOLD beside an engine stopped at the end token that only `generate` has."""
    candidate = Candidate(model=load_model("Qwen2.5-0.5B"), method="gold", vllm=vllm)
    trainer = SimpleNamespace(generation_config=SimpleNamespace(), vllm_generation=SimpleNamespace())
    set_full_length(trainer, candidate)
    if vllm == "off":
        assert trainer.generation_config.eos_token_id == candidate.model.vocab_size
    else:
        assert trainer.vllm_generation.generation_kwargs == {"ignore_eos": True}
