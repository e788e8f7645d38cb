"""train.py for candidates that no command of TRL can train; it reads train.yaml and takes the arguments of `trl`.

TRL has a trainer for the method but no command, or the adapters must be cast to float32 after the trainer is built
(`Candidate.script_casts_to_float32`), or the base must be prepared by PEFT before the trainer gets it, or the published
weights must be dequantized while loading, or be loaded with kernels that have a backward pass, or PEFT would gather the
whole model to save adapters (`Candidate.script_saves_adapters_alone`).
"""

from collections.abc import Iterator
from functools import partial

from planner.candidate import Candidate
from planner.files.texts import launch_text
from planner.launch.trl_config import REWARD_FUNCTION
from planner.methods import Method, release
from planner.quantizations import LoadingConfig

_text = partial(launch_text, "script")

LOADING = '    loading = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}\n'
TRAIN = '    trainer.train(resume_from_checkpoint=True if resumed == "true" else resumed)\n'

# How models get to the trainer: the policy that the trainer loads itself, or this script.
POLICY_OF_TRAINER = "    training.model_init_kwargs = {{**source, **loading, **(training.model_init_kwargs or {{}})}}\n"
PPO_SETTINGS = "    settings = {{**source, **loading}}\n"
ADDED = "    policy = get_peft_model(policy, get_peft_config(model), autocast_adapter_dtype=False)\n"
TEACHER_REVISION = '"revision": training.teacher_model_revision, '

EXPERIMENTAL = "which TRL has no command for; launch.sh starts it."
KBIT_PREPARED = "with a base that PEFT prepares (what is not quantized is float32); launch.sh starts it."

REWARDS = f'''"""FILL IN: the reward of a completion."""


def {REWARD_FUNCTION}(completions, **columns):
    """One number per completion; `columns` has the prompts and the dataset's other columns. Here: shorter is better."""
    return [-float(len(str(completion))) for completion in completions]
'''


def needs_script(candidate: Candidate) -> bool:
    """True if the training is started with a train.py of ours instead of TRL's command for the method."""
    built = candidate.script_casts_to_float32 or candidate.script_saves_adapters_alone
    own = candidate.method_row.experimental or built or prepares_base(candidate)
    return own or loading_config(candidate) is not None


def prepares_base(candidate: Candidate) -> bool:
    """True if the script calls PEFT's `prepare_model_for_kbit_training` on a quantized base."""
    return candidate.prepare_model_for_kbit_training and candidate.quantization_row.bitsandbytes


def loading_config(candidate: Candidate) -> LoadingConfig | None:
    """The config with which the policy's published weights are loaded; None: without one."""
    row = candidate.quantization_row if candidate.quantization_row.quantized else candidate.model.quantization_row
    return None if candidate.quantization_row.dequantized else row.loaded_with


def train_script(candidate: Candidate) -> str:
    """The text of train.py."""
    row, by_config = candidate.method_row, candidate.method_row.policy_loader == "config"
    values = {
        "auto": _auto_class(candidate),
        "quantization": _quantization(candidate),
        "labels": " num_labels=1," if row.head == "score" else "",
        "revision": "" if row.experimental else TEACHER_REVISION,
        "trainer": row.trainer,
    }
    return _text("script").format(
        reason=_reason(candidate),
        remote_code=_remote_code(candidate),
        imports=_imports(candidate),
        script_arguments=row.script_arguments.rpartition(".")[2],
        config=row.config,
        models="".join(_models(candidate)).format(**values) + _chat(row),
        data=_text("tokens") if row.value_model else _text("messages") if row.asynchronous else "",
        arguments="".join(f"        {line},\n" for line in _arguments(candidate)).format(**values),
        classes=_text("model_without_dtype") if by_config else "",
        model="Model" if by_config else "ModelConfig",
        loading="" if by_config else LOADING,
        evaluated="" if by_config else _text("evaluated"),
        cast=_text("cast") if candidate.script_casts_to_float32 else "",
        saved=_text("saved_alone") if candidate.script_saves_adapters_alone else "",
        train=(TRAIN if row.resumes else _text("train_from_the_start")).format(**values),
        **values,
    )


def _chat(row: Method) -> str:
    """The statements with which the tokenizer of an asynchronous trainer gets a chat template."""
    return _text("chat") * row.asynchronous + _text("parsed_chat") * row.packs_trees


def _loads_policy(candidate: Candidate) -> bool:
    """True if the script loads the policy, and not the trainer."""
    return candidate.method_row.policy_loader == "script" or prepares_base(candidate)


def _auto_class(candidate: Candidate) -> str:
    """The class of Transformers that loads the policy."""
    score = candidate.method_row.head == "score"
    return "AutoModelForSequenceClassification" if score else candidate.model.loading_class


def _quantization(candidate: Candidate) -> str:
    """The expression for the quantization that the policy is loaded with."""
    config = loading_config(candidate)
    return _construction(config) if config else "get_quantization_config(model)"


def _remote_code(candidate: Candidate) -> str:
    """The item `trust_remote_code`: until trl 1.6 an argument of `ModelConfig`, then of the trainers, but not of PPO's.

    Source: trl 1.6, trainer/model_config.py; trl 1.7, trainer/sft_config.py; trl 1.12, experimental/ppo/ppo_config.py.
    """
    if release(candidate.trl_version) < (1, 7):
        return ', "trust_remote_code": model.trust_remote_code'
    return "" if candidate.method_row.value_model else ', "trust_remote_code": training.trust_remote_code'


def _takes_quantization(candidate: Candidate) -> bool:
    """True if the trainers that load the policy have an argument for its quantization."""
    return release(candidate.trl_version) >= (1, 8)


def _imports(candidate: Candidate) -> str:
    """The lines that import what the script uses."""
    row, config, loads = candidate.method_row, loading_config(candidate), _loads_policy(candidate)
    arguments_module, _, arguments_class = row.script_arguments.rpartition(".")
    wanted = [
        ("dataclasses", "dataclass", row.policy_loader == "config"),
        ("typing", "ClassVar", row.policy_loader == "config"),
        ("importlib", "import_module", row.takes_reward_functions),
        ("datasets", "load_dataset", True),
        ("peft", "get_peft_model", candidate.script_adds_adapters),
        ("peft", "prepare_model_for_kbit_training", prepares_base(candidate)),
        ("transformers", _auto_class(candidate), loads),
        ("transformers", "AutoModelForSequenceClassification", row.value_model),
        ("transformers", "AutoTokenizer", row.policy_loader == "script" or row.asynchronous),
        ("transformers", config.name if config else "", config is not None),
        *(("trl", name, True) for name in ("DatasetMixtureConfig", "ModelConfig", "TrlParser", "get_dataset")),
        ("trl", "get_peft_config", row.takes_adapters),
        ("trl", "get_quantization_config", config is None),
        ("trl", "get_kbit_device_map", not loads and not _takes_quantization(candidate)),
        ("trl.chat_template_utils", "add_response_schema", row.packs_trees),
        (row.module, row.config, True),
        (row.module, row.trainer, True),
        (arguments_module, arguments_class, True),
    ]
    modules = dict.fromkeys(module for module, _, used in wanted if used)
    names = {module: sorted({name for each, name, used in wanted if used and each == module}) for module in modules}
    return "\n".join(_import_line(module, each) for module, each in names.items())


def _import_line(module: str, names: list[str]) -> str:
    """An import statement, in lines of at most 120 columns."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= 120:
        return line
    return "\n".join((f"from {module} import (", *(f"    {name}," for name in names), ")"))


def _construction(config: LoadingConfig) -> str:
    """The expression that makes the config."""
    arguments = (
        f'{name}="{value}"' if isinstance(value, str) else f"{name}={value}" for name, value in config.arguments.items()
    )
    return f"{config.name}({', '.join(arguments)})"


def _reason(candidate: Candidate) -> str:
    """Why there is a script: the end of the first sentence of its docstring."""
    if loading_config(candidate):
        return _text("trainable") if candidate.quantization_row.quantized else _text("dequantized")
    if candidate.script_casts_to_float32:
        return _text("float32_adapters")
    if candidate.script_saves_adapters_alone:
        return _text("adapters_alone")
    return KBIT_PREPARED if prepares_base(candidate) else EXPERIMENTAL


def _models(candidate: Candidate) -> Iterator[str]:
    """The statements before the dataset is loaded: the models, tokens and rewards that the trainer gets."""
    row = candidate.method_row
    if _loads_policy(candidate):
        yield PPO_SETTINGS if row.value_model else _text("own_settings")
        yield _text("policy")
    else:
        yield _text("policy_of_config") if row.policy_loader == "config" else POLICY_OF_TRAINER
        yield _text("quantized_by_kwargs") * (not _takes_quantization(candidate))
    yield _text("prepared") * prepares_base(candidate)
    yield ADDED * candidate.script_adds_adapters
    yield _text("reference") * candidate.script_loads_reference
    yield _text("teacher") * row.teacher
    yield _text("ppo_models") * row.value_model
    yield _text("tokenizer") * (row.policy_loader == "script")
    yield _text("rewards_by_name") * (row.takes_reward_functions)


def _arguments(candidate: Candidate) -> Iterator[str]:
    """The arguments of the trainer that not every method has."""
    row = candidate.method_row
    adapters = "None" if candidate.script_adds_adapters else "get_peft_config(model)"
    yield from (f"peft_config={adapters}",) * row.takes_adapters
    if _loads_policy(candidate):
        yield "model=policy"
    else:
        yield "model=model.model_name_or_path"
        argument = _takes_quantization(candidate) and row.policy_loader == "trainer"
        yield from ("quantization_config={quantization}",) * argument
    yield from ("processing_class=tokenizer",) * (row.policy_loader == "script" or row.asynchronous)
    yield from ("ref_model=reference",) * candidate.script_loads_reference
    yield from ("teacher_model=training.teacher_model_name_or_path",) * row.teacher
    yield from ("reward_funcs=rewards",) * (row.takes_reward_functions)
    yield from ("ref_model=reference", "reward_model=reward", "value_model=value") * row.value_model
