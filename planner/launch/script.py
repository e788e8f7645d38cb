"""train.py for candidates that no command of TRL can train; it reads train.yaml.

TRL has a trainer for the method but no command, or the adapters must be cast to float32 after the trainer is built
(`Candidate.script_casts_to_float32`), or the base must be prepared by PEFT before the trainer gets it, or the published
weights must be dequantized while loading, or be loaded with kernels that have a backward pass.
"""

from planner.candidate import Candidate
from planner.launch.trl_config import REWARD_FUNCTION, REWARD_MODULE, needs_reward_function
from planner.methods import Method
from planner.quantizations import LoadingConfig

# Arguments of a trainer besides model, arguments, data, tokenizer and adapters.
REWARDS_ARGUMENT = "\n        reward_funcs=script.reward_model_name_or_path or {rewards},"
TEACHER_ARGUMENT = "\n        teacher_model=training.teacher_model_name_or_path,"
REFERENCE_ARGUMENT = "\n        ref_model=load({auto}, quantization_config={quantization}),"
VALUE_ARGUMENTS = (
    "\n        ref_model=None if model.use_peft else load({auto}),"
    "\n        reward_model=load(AutoModelForSequenceClassification, training.reward_model_path, num_labels=1),"
    "\n        value_model=load(AutoModelForSequenceClassification, training.reward_model_path, num_labels=1),"
)
# Lines of the script before the trainer is constructed: how a teacher is loaded, as the policy that a trainer loads
# itself, or as the one that this script loads; and tokens for PPO (trl 1.12, experimental/ppo/ppo_trainer.py,
# `queries = data["input_ids"]`).
TEACHER_AS_POLICY = (
    "    training.teacher_model_init_kwargs = "
    "{**(training.model_init_kwargs or {}), **(training.teacher_model_init_kwargs or {})}\n"
)
TEACHER_AS_LOADED = (
    "    training.teacher_model_init_kwargs = "
    '{"dtype": model.dtype, "attn_implementation": model.attn_implementation, '
    "**(training.teacher_model_init_kwargs or {})}\n"
)
TOKENS = (
    '    rows = rows.map(lambda row: {"input_ids": tokenizer(row["prompt"])["input_ids"]}, '
    "remove_columns=rows.column_names)\n"
)
# PEFT's preparation of a quantized base: of the model that this script loads anyway, and lines that load it for a
# trainer that would load it itself (trl 1.16, trainer/sft_trainer.py, `SFTTrainer.__init__`, takes either).
PREPARED = "prepare_model_for_kbit_training({}, use_gradient_checkpointing=training.gradient_checkpointing)"
LOADED_AND_PREPARED = """    quantization = get_quantization_config(model)
    policy = {auto}.from_pretrained(
        model.model_name_or_path, quantization_config=quantization,{labels} **training.model_init_kwargs
    )
    policy = {prepared}
    training.model_init_kwargs = None
"""
PREPARE_IMPORT = "from peft import prepare_model_for_kbit_training\n"

SCRIPT = '''"""{trainer} on the settings of train.yaml; launch.sh starts it."""

from datasets import load_dataset
from transformers import {autos}, AutoTokenizer
from trl import ModelConfig, {script_class}TrlParser, get_peft_config{quantization_import}
from {module} import {config}, {trainer}
{imports}

def main() -> None:
    script, training, model = TrlParser(({script_name}, {config}, ModelConfig)).parse_args_and_config()

    def load(auto, path=model.model_name_or_path, **settings):
        kwargs = {{"dtype": model.dtype, "attn_implementation": model.attn_implementation, **settings}}
        return auto.from_pretrained(path, **kwargs)

    tokenizer = AutoTokenizer.from_pretrained(model.model_name_or_path, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    rows = load_dataset(script.dataset_name, name=script.dataset_config)[script.dataset_train_split]
{prepared}    trainer = {trainer}(
        model={policy},
        args=training,
        train_dataset=rows,
        processing_class=tokenizer,
        peft_config=get_peft_config(model),{extra}
    )
{cast}    trainer.train()
    trainer.save_model(training.output_dir)


if __name__ == "__main__":
    main()
'''

# For a trainer that loads its model; does what TRL's own script does (trl 1.16, scripts/sft.py and others), and casts,
# dequantizes, or chooses kernels.
COMMAND_SCRIPT = '''"""{trainer} on the settings of train.yaml, {reason}"""

from datasets import load_dataset
from {module} import {config}, {trainer}
from trl import ModelConfig, {script_class}TrlParser, get_peft_config{quantization_import}
{imports}

def main() -> None:
    script, training, model = TrlParser(({script_name}, {config}, ModelConfig)).parse_args_and_config()
    training.model_init_kwargs = {{"dtype": model.dtype, "attn_implementation": model.attn_implementation}}
{prepared}    rows = load_dataset(script.dataset_name, name=script.dataset_config)[script.dataset_train_split]
    trainer = {trainer}(
        model={policy},
        args=training,
        train_dataset=rows,
        quantization_config={quantization},
        peft_config=get_peft_config(model),{extra}
    )
{cast}    trainer.train()
    trainer.save_model(training.output_dir)


if __name__ == "__main__":
    main()
'''

CAST = """    for parameter in trainer.model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
"""

FLOAT32_ADAPTERS = """with adapters in float32; launch.sh starts it.

TRL casts adapters on a 4-bit or 8-bit model to bfloat16, PEFT copies a score head in the model's dtype, and fp16's
GradScaler cannot unscale gradients of 16 bits.
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
    own = candidate.method_row.experimental or candidate.script_casts_to_float32 or prepares_base(candidate)
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
    row, reward_function = candidate.method_row, needs_reward_function(candidate)
    script_module, _, script_name = row.script_arguments.rpartition(".")
    own_arguments = f"from {script_module} import {script_name}" if script_module != "trl" else ""
    loading, prepares = loading_config(candidate), prepares_base(candidate)
    quantization = _construction(loading) if loading else "get_quantization_config(model)"
    auto = "AutoModelForSequenceClassification" if row.head == "score" else candidate.model.loading_class
    policy = "model.model_name_or_path"
    if not row.loads_policy:
        loaded = f"load({auto}, quantization_config={quantization})"
        policy = PREPARED.format(loaded) if prepares else loaded
    elif prepares:
        policy, quantization = "policy", "None"
    return (COMMAND_SCRIPT if row.loads_policy else SCRIPT).format(
        trainer=row.trainer,
        config=row.config,
        module=row.module,
        autos=f"{auto}, AutoModelForSequenceClassification" if row.value_model else auto,
        script_class="" if own_arguments else "ScriptArguments, ",
        script_name=script_name,
        imports=(f"from transformers import {loading.name}\n" if loading else "")
        + PREPARE_IMPORT * prepares
        + f"from transformers import {auto}\n" * (policy == "policy")
        + own_arguments
        + "\n" * bool(own_arguments)
        + f"\nfrom {REWARD_MODULE} import {REWARD_FUNCTION}\n" * reward_function,
        prepared=_preparation(row) + _loaded_and_prepared(row, auto) * (policy == "policy"),
        policy=policy,
        extra=_extra_arguments(candidate).format(
            rewards=REWARD_FUNCTION if reward_function else "None", quantization=quantization, auto=auto
        ),
        cast=CAST if candidate.script_casts_to_float32 else "",
        quantization=quantization,
        quantization_import="" if loading else ", get_quantization_config",
        reason=_reason(candidate),
    )


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
    return KBIT_PREPARED if prepares_base(candidate) else EXPERIMENTAL


def _loaded_and_prepared(row: Method, auto: str) -> str:
    """Lines that load and prepare the policy of a trainer that would load it itself."""
    labels = " num_labels=1," if row.head == "score" else ""
    return LOADED_AND_PREPARED.format(auto=auto, labels=labels, prepared=PREPARED.format("policy"))


def _extra_arguments(candidate: Candidate) -> str:
    """Arguments of the method's trainer for its other models."""
    row = candidate.method_row
    rewards = REWARDS_ARGUMENT if row.reward_model == "optional" else ""
    reference = REFERENCE_ARGUMENT * candidate.script_loads_reference
    return reference + rewards + TEACHER_ARGUMENT * row.teacher + VALUE_ARGUMENTS * row.value_model


def _preparation(row: Method) -> str:
    """Lines before the method's trainer is constructed."""
    teacher = (TEACHER_AS_POLICY if row.loads_policy else TEACHER_AS_LOADED) if row.teacher else ""
    return teacher + TOKENS * row.value_model
