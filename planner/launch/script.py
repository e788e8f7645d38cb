"""train.py for candidates that no command of TRL can train; it reads train.yaml and takes the arguments of `trl`.

TRL has a trainer for the method but no command, or the adapters must be cast to float32 after the trainer is built
(`Candidate.script_casts_to_float32`), or the base must be prepared by PEFT before the trainer gets it, or the published
weights must be dequantized while loading, or be loaded with kernels that have a backward pass, or PEFT would gather the
whole model to save adapters (`Candidate.script_saves_adapters_alone`).
"""

from collections.abc import Iterator

from planner.candidate import Candidate
from planner.launch.trl_config import REWARD_FUNCTION
from planner.methods import release
from planner.quantizations import LoadingConfig

# What TRL's own scripts do (trl 1.16, scripts/sft.py and others, `main`), and resumes from the text "true", which a
# command line gives.
SCRIPT = '''"""{trainer} on the settings of train.yaml, {reason}"""

{imports}
{classes}

def main() -> None:
    parser = TrlParser(({script_arguments}, {config}, {model}, DatasetMixtureConfig))
    script, training, model, mixture = parser.parse_args_and_config()
    source = {{"revision": model.model_revision{remote_code}}}
{loading}{models}    if mixture.datasets:
        rows = get_dataset(mixture)
    else:
        rows = load_dataset(script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming)
{data}    trainer = {trainer}(
        args=training,
        train_dataset=rows[script.dataset_train_split],
{evaluated}        peft_config={adapters},
{arguments}    )
{cast}{saved}    resumed = training.resume_from_checkpoint
{train}    trainer.save_model(training.output_dir)
    if training.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
'''
LOADING = '    loading = {"dtype": model.dtype, "attn_implementation": model.attn_implementation}\n'
EVALUATED = """        eval_dataset=rows[script.dataset_test_split] if training.eval_strategy != "no" else None,
"""
# Both configs have a field `dtype`, at which argparse stops ("conflicting option string: --dtype").
MODEL_WITHOUT_DTYPE = """

@dataclass
class Model(ModelConfig):
    '''What TRL reads of the model, but for `dtype`, which AsyncGRPOConfig has.'''

    dtype: ClassVar[str] = "auto"

"""
CAST = """    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    del parameter  # the model's last, which would stay whole beside its shards
"""
# `Trainer.get_tp_size` is 1 without it, too (transformers 5.23, trainer.py).
SAVED_ALONE = (
    "    trainer.model.get_base_model()._tp_size = None  # at 1 PEFT gathers the whole model to save adapters\n"
)
TRAIN = '    trainer.train(resume_from_checkpoint=True if resumed == "true" else resumed)\n'
TRAIN_FROM_THE_START = """    if resumed:
        raise SystemExit("{trainer} does not resume from a checkpoint. Remove resume_from_checkpoint.")
    trainer.train()
"""

# How models get to the trainer: the policy that the trainer loads itself, or this script.
POLICY_OF_TRAINER = "    training.model_init_kwargs = {{**source, **loading, **(training.model_init_kwargs or {{}})}}\n"
# The trainer names the attention itself (trl 1.16, experimental/async_grpo/async_grpo_trainer.py).
POLICY_OF_CONFIG = """    model.dtype = training.dtype
    loading = {{"quantization_config": {quantization}}}
    training.model_init_kwargs = {{**source, **loading, **(training.model_init_kwargs or {{}})}}
"""
# Until trl 1.7, scripts/sft.py, `main`: the trainers have no argument `quantization_config`.
QUANTIZED_BY_KWARGS = """    quantization = {quantization}
    if quantization is not None:
        training.model_init_kwargs["quantization_config"] = quantization
        training.model_init_kwargs["device_map"] = get_kbit_device_map()
"""
OWN_SETTINGS = """    settings = {{**source, **loading, **(training.model_init_kwargs or {{}})}}
    training.model_init_kwargs = None
"""
PPO_SETTINGS = "    settings = {{**source, **loading}}\n"
POLICY = """    policy = {auto}.from_pretrained(
        model.model_name_or_path, quantization_config={quantization},{labels} **settings
    )
"""
PREPARED = (
    "    policy = prepare_model_for_kbit_training(policy, use_gradient_checkpointing=training.gradient_checkpointing)\n"
)
ADDED = "    policy = get_peft_model(policy, get_peft_config(model), autocast_adapter_dtype=False)\n"
REFERENCE = """    reference = {auto}.from_pretrained(
        model.model_name_or_path, quantization_config={quantization}, **settings
    )
"""
TEACHER = (
    "    training.teacher_model_init_kwargs = {{{revision}**loading, **(training.teacher_model_init_kwargs or {{}})}}\n"
)
TEACHER_REVISION = '"revision": training.teacher_model_revision, '
# The script arguments of GRPO, which experimental methods with rewards take, too (trl 1.16, scripts/grpo.py, `main`).
REWARDS_BY_NAME = """    rewards = [script.reward_model_name_or_path] if script.reward_model_name_or_path else []
    for name in script.reward_funcs or []:
        module, _, function = name.rpartition(".")
        reward = getattr(import_module(module or "trl.rewards"), function)
        if function == "get_soft_overlong_punishment":
            reward = reward(max_completion_len=1280, soft_punish_cache=256)
        rewards.append(reward)
"""
# PPO's models, and its rows of tokens (trl 1.12, experimental/ppo/ppo_trainer.py, `queries = data["input_ids"]`).
PPO_MODELS = """    full = not model.use_peft
    reference = {auto}.from_pretrained(model.model_name_or_path, **settings) if full else None
    classifier = AutoModelForSequenceClassification
    reward = classifier.from_pretrained(training.reward_model_path, num_labels=1, **loading)
    value = classifier.from_pretrained(training.reward_model_path, num_labels=1, **loading)
"""
TOKENS = """    rows = rows.map(
        lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]},
        remove_columns=rows[script.dataset_train_split].column_names,
    )
"""
TOKENIZER = """    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, padding_side="left", **source)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
"""
# AsyncGRPO takes prompts as messages, and a tokenizer with a chat template that TRL knows how to parse: "Unrecognized
# chat template, failed to add response schema" (trl 1.16, experimental/async_grpo/async_rollout_worker.py,
# `_generate_one`; chat_template_utils.py, `add_response_schema`, which knows 25 of them).
CHAT = """    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, padding_side="left", **source)
    if tokenizer.chat_template is None:  # of a base model: prompts are text
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    if tokenizer.response_template is None:
        try:
            add_response_schema(tokenizer)
        except ValueError:  # TRL does not know the chat template: completions are text, without calls of tools
            text = {"content": {"content": "text"}}
            tokenizer.response_template = {
                "defaults": {"role": "assistant"}, "start_anchor_pattern": "", "fields": text
            }
"""
MESSAGES = """    rows = rows.map(
        lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}]} if isinstance(row["prompt"], str) else {}
    )
"""

FLOAT32_ADAPTERS = """with adapters in float32; launch.sh starts it.

TRL casts adapters on a 4-bit or 8-bit model to bfloat16, PEFT copies a score head in the model's dtype, and fp16's
GradScaler cannot unscale gradients of 16 bits.
"""
ADAPTERS_ALONE = """with experts divided among GPUs; launch.sh starts it.

PEFT would gather the whole model on every process to save adapters.
"""
EXPERIMENTAL = "which TRL has no command for; launch.sh starts it."
KBIT_PREPARED = "with a base that PEFT prepares (what is not quantized is float32); launch.sh starts it."
DEQUANTIZED = """with dequantized weights; launch.sh starts it.

The plan trains the checkpoint's quantized weights as 16-bit or 32-bit ones.
"""
TRAINABLE = """with kernels that have a backward pass; launch.sh starts it.

Transformers loads a GPTQ or AWQ base with kernels for inference unless it is told to train.
"""

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
    return SCRIPT.format(
        reason=_reason(candidate),
        remote_code=_remote_code(candidate),
        imports=_imports(candidate),
        script_arguments=row.script_arguments.rpartition(".")[2],
        config=row.config,
        models="".join(_models(candidate)).format(**values) + CHAT * row.asynchronous,
        data=TOKENS if row.value_model else MESSAGES if row.asynchronous else "",
        arguments="".join(f"        {line},\n" for line in _arguments(candidate)).format(**values),
        classes=MODEL_WITHOUT_DTYPE if by_config else "",
        model="Model" if by_config else "ModelConfig",
        loading="" if by_config else LOADING,
        evaluated="" if by_config else EVALUATED,
        adapters="None" if candidate.script_adds_adapters else "get_peft_config(model)",
        cast=CAST if candidate.script_casts_to_float32 else "",
        saved=SAVED_ALONE if candidate.script_saves_adapters_alone else "",
        train=(TRAIN if row.resumes else TRAIN_FROM_THE_START).format(**values),
        **values,
    )


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
        ("importlib", "import_module", row.reward_model == "optional"),
        ("datasets", "load_dataset", True),
        ("peft", "get_peft_model", candidate.script_adds_adapters),
        ("peft", "prepare_model_for_kbit_training", prepares_base(candidate)),
        ("transformers", _auto_class(candidate), loads),
        ("transformers", "AutoModelForSequenceClassification", row.value_model),
        ("transformers", "AutoTokenizer", row.policy_loader == "script" or row.asynchronous),
        ("transformers", config.name if config else "", config is not None),
        *(("trl", name, True) for name in ("DatasetMixtureConfig", "ModelConfig", "TrlParser", "get_dataset")),
        ("trl", "get_peft_config", True),
        ("trl", "get_quantization_config", config is None),
        ("trl", "get_kbit_device_map", not loads and not _takes_quantization(candidate)),
        ("trl.chat_template_utils", "add_response_schema", row.asynchronous),
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
        return TRAINABLE if candidate.quantization_row.quantized else DEQUANTIZED
    if candidate.script_casts_to_float32:
        return FLOAT32_ADAPTERS
    if candidate.script_saves_adapters_alone:
        return ADAPTERS_ALONE
    return KBIT_PREPARED if prepares_base(candidate) else EXPERIMENTAL


def _models(candidate: Candidate) -> Iterator[str]:
    """The statements before the dataset is loaded: the models, tokens and rewards that the trainer gets."""
    row = candidate.method_row
    if _loads_policy(candidate):
        yield PPO_SETTINGS if row.value_model else OWN_SETTINGS
        yield POLICY
    else:
        yield POLICY_OF_CONFIG if row.policy_loader == "config" else POLICY_OF_TRAINER
        yield QUANTIZED_BY_KWARGS * (not _takes_quantization(candidate))
    yield PREPARED * prepares_base(candidate)
    yield ADDED * candidate.script_adds_adapters
    yield REFERENCE * candidate.script_loads_reference
    yield TEACHER * row.teacher
    yield PPO_MODELS * row.value_model
    yield TOKENIZER * (row.policy_loader == "script")
    yield REWARDS_BY_NAME * (row.reward_model == "optional")


def _arguments(candidate: Candidate) -> Iterator[str]:
    """The arguments of the trainer that not every method has."""
    row = candidate.method_row
    if _loads_policy(candidate):
        yield "model=policy"
    else:
        yield "model=model.model_name_or_path"
        argument = _takes_quantization(candidate) and row.policy_loader == "trainer"
        yield from ("quantization_config={quantization}",) * argument
    yield from ("processing_class=tokenizer",) * (row.policy_loader == "script" or row.asynchronous)
    yield from ("ref_model=reference",) * candidate.script_loads_reference
    yield from ("teacher_model=training.teacher_model_name_or_path",) * row.teacher
    yield from ("reward_funcs=rewards",) * (row.reward_model == "optional")
    yield from ("ref_model=reference", "reward_model=reward", "value_model=value") * row.value_model
