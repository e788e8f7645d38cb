"""Construction of each TRL trainer of a probe: one table. Models are paths, from which TRL loads them."""

import contextlib
import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from math import isqrt
from types import SimpleNamespace
from typing import Any

import datasets
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from msgspec import Struct
from peft import get_peft_model
from transformers import (
    AutoConfig,
    EvalPrediction,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from trl import ModelConfig, get_peft_config, get_quantization_config

from planner.candidate import Candidate
from planner.errors import InputError, UnknownArchitecture
from planner.jobs.settings import settings_of, trl_arguments
from planner.methods import METHODS, Method, MethodName
from planner.models.image_tower import ImageTower, image_tower
from planner.models.lora_targets import is_expression
from probes.processors import RGB, image_of, image_tokens
from probes.step.built_trainer import DTYPES, BuiltTrainer
from probes.step.rollouts import EndlessRollouts, NoServer, NoTeacher
from probes.substitution import substituted

# Settings with the name of a model, which the trainer gets as a model.
MODEL_NAMES = ("model_name_or_path", "reward_model_name_or_path", "teacher_model_name_or_path")

CONTENT_ALONE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"  # a chat template

TokenSource = Callable[[int], list[int]]  # from a count: that many token ids, at least one
# A row of the dataset from: the candidate, the source of its tokens, its index, and by how many tokens it is shorter
# than the longest row.
Row = Callable[[Candidate, TokenSource, int, int], dict[str, Any]]


class TrainerInputs(Struct, frozen=True, kw_only=True):
    """Everything that a probe gives a trainer (probes/worker/workload.py)."""

    candidate: Candidate
    model: str  # the path of the model; so are the next two
    teacher: str | None  # None: the method has none
    reward_model: str | None  # None: rewards come from a function
    model_init_kwargs: dict[str, Any]  # how the paths are loaded
    tokenizer: PreTrainedTokenizerFast
    teacher_tokenizer: PreTrainedTokenizerFast | None = None  # of a loss that compares tokenizers
    processor: ProcessorMixin | None = None  # None: text, or images that a collator puts into batches (`with_images`)
    build_datasets: Callable[[Row], dict[str, datasets.Dataset]]  # `train_dataset`, and `eval_dataset` if there is one
    run_arguments: dict[str, Any]  # training arguments of the run, not of the candidate, such as `output_dir`


class TrainerRecipe(Struct, frozen=True, kw_only=True):
    """Rows and training arguments of one method's trainer. The names of its classes are in `METHODS`."""

    row: Row
    arguments: Callable[[TrainerInputs], dict[str, Any]] = lambda inputs: {}  # besides the candidate's settings
    reference: Callable[[Any], Any] = lambda trainer: trainer.ref_model  # None: the policy without its adapters
    changes_generation_config: bool = False  # its config has no `generation_kwargs`, which set the full length
    chats: bool = False  # its rows are conversations, which the tokenizer's template turns into text
    processes_images: bool = False  # its rows have images and text, of which a processor makes a batch


def build_trainer(inputs: TrainerInputs) -> BuiltTrainer:
    """Build the TRL trainer of the candidate's method, ready for `train()`, as a training script of TRL would build it.

    Raises:
        InputError: the candidate has a setting that the trainer has no argument for.
    """
    candidate, method = inputs.candidate, inputs.candidate.method_row
    arguments = training_arguments(inputs)  # before the model, which DeepSpeed shards as they say
    settings: dict[str, Any] = {
        "model": loaded_by_script(inputs) if method.policy_loader == "script" else inputs.model,
        "args": arguments,
        "processing_class": processing_class(inputs),
    } | inputs.build_datasets(TRAINERS[candidate.method].row)
    settings |= {"peft_config": get_peft_config(model_config(candidate))} if method.takes_adapters else {}
    settings |= {"compute_metrics": no_metrics} if candidate.kept_eval_batches else {}
    if method.policy_loader == "trainer":
        settings["quantization_config"] = quantization_config(inputs)
    settings |= other_models(inputs)
    if candidate.script_adds_adapters:
        settings["model"] = get_peft_model(settings["model"], settings.pop("peft_config"), autocast_adapter_dtype=False)
    with without_server(inputs), with_teacher_tokenizer(inputs):
        trainer = _class_of_trl(candidate, method.trainer)(**settings)
    if candidate.images_per_row and inputs.processor is None:
        trainer.data_collator = with_images(trainer.data_collator, candidate, trainer.model.config)
    if TRAINERS[candidate.method].changes_generation_config:
        set_full_length(trainer, candidate)
    if candidate.tuning == "lora" and not candidate.autocast_adapter_dtype:
        adapters_in_dtype(trainer.model, DTYPES[candidate.dtype])
    if candidate.script_casts_to_float32:
        train_in_float32(trainer.model)
    if candidate.script_saves_adapters_alone:
        trainer.model.get_base_model()._tp_size = None
    return BuiltTrainer(trainer=trainer, models=resident_models(trainer, method))


def processing_class(inputs: TrainerInputs) -> ProcessorMixin | PreTrainedTokenizerFast:
    """Return what turns rows into tokens, with a chat template for rows that are conversations."""
    if TRAINERS[inputs.candidate.method].chats:
        inputs.tokenizer.chat_template = CONTENT_ALONE
    return inputs.processor or inputs.tokenizer


@contextlib.contextmanager
def without_server(inputs: TrainerInputs) -> Iterator[None]:
    """Replace TRL's vLLM clients inside the block, so that a trainer contacts no server.

    A teacher's server scores by `NoTeacher`; a run that has a server for its adapters keeps the client.
    """
    candidate = inputs.candidate
    if candidate.method_row.teacher_server and not candidate.method_row.asynchronous:
        client = importlib.import_module("trl.generation.vllm_client")
        with substituted(client, "VLLMClient", lambda **_: NoTeacher()):
            yield
        return
    if not candidate.method_row.asynchronous or "vllm_server_base_url" in inputs.run_arguments:
        yield
        return
    module = importlib.import_module(candidate.method_row.trainer_module)
    with substituted(module, "VLLMClient", lambda *_: NoServer(candidate)):
        yield


@contextlib.contextmanager
def with_teacher_tokenizer(inputs: TrainerInputs) -> Iterator[None]:
    """Give GOLD the teacher's tokenizer inside the block, which AutoTokenizer would look for among published ones.

    Source: trl 1.16, experimental/gold/gold_trainer.py, `GOLDTrainer.__init__` (`teacher_tokenizer`); see
    `prompts_as_tokens`, probes/worker/engines.py.
    """
    if inputs.teacher_tokenizer is None:
        yield
        return
    module = importlib.import_module(inputs.candidate.method_row.trainer_module)
    found = SimpleNamespace(from_pretrained=lambda *_, **__: inputs.teacher_tokenizer)
    with substituted(module, "AutoTokenizer", found):
        yield


def resident_models(trainer: Any, method: Method) -> tuple[torch.nn.Module, ...]:
    """Return the trainer's models, the policy first; of PPO's value model also the backbone, which a pass calls."""
    others = [TRAINERS[method.name].reference(trainer)] if method.reference != "never" else []
    others += [trainer.teacher_model] if method.teacher else []
    if method.value_model:
        others += [trainer.value_model.base_model, trainer.value_model, trainer.reward_model]
    elif method.reward_model == "optional":
        others += trainer.reward_funcs
    policy = trainer.policy_model if method.value_model else trainer.model
    return (policy, *(model for model in others if isinstance(model, torch.nn.Module)))


def other_models(inputs: TrainerInputs) -> dict[str, Any]:
    """Return the trainer's arguments for rewards, teacher and reference."""
    candidate, method = inputs.candidate, inputs.candidate.method_row
    settings: dict[str, Any] = {}
    if method.asynchronous:
        transfer = None if candidate.sends_adapters else NoServer(candidate)
        rollouts = {"rollout_worker": EndlessRollouts(candidate), "weight_transfer": transfer}
        return rollouts | ({"reward_funcs": [distinct_rewards]} if method.takes_reward_functions else {})
    if method.value_model:
        return ppo_models(inputs)
    if method.takes_reward_functions:
        settings["reward_funcs"] = [distinct_rewards if inputs.reward_model is None else inputs.reward_model]
    if method.reward_model == "optional":
        settings["reward_processing_classes"] = None if inputs.reward_model is None else [inputs.tokenizer]
    if method.teacher:
        settings["teacher_model"] = inputs.teacher
    if candidate.script_loads_reference:
        settings["ref_model"] = loaded_by_script(inputs)
    return settings


def ppo_models(inputs: TrainerInputs) -> dict[str, Any]:
    """Return PPO's models besides the policy as the exported train.py loads them: a reference in full, two scores."""
    path, settings = inputs.reward_model or inputs.model, inputs.model_init_kwargs
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    return {
        "ref_model": loaded_by_script(inputs) if inputs.candidate.tuning == "full" else None,
        "reward_model": load(path, num_labels=1, **settings),
        "value_model": load(path, num_labels=1, **settings),
    }


def loaded_by_script(inputs: TrainerInputs) -> PreTrainedModel:
    """Return the model as the exported train.py loads it for a trainer that would load any as a `CausalLM`."""
    auto, quantization = getattr(transformers, inputs.candidate.model.loading_class), quantization_config(inputs)
    return auto.from_pretrained(inputs.model, quantization_config=quantization, **inputs.model_init_kwargs)


def training_arguments(inputs: TrainerInputs) -> Any:
    """Build the method's own config (`SFTConfig`, ...) with the candidate's settings under their own names.

    Raises:
        InputError: neither the config nor TRL's `ModelConfig` has a field for a setting, which would be lost.
    """
    candidate = inputs.candidate
    config = _class_of_trl(candidate, candidate.method_row.config)
    names, model_names = names_of(candidate), {field.name for field in fields(ModelConfig)}
    settings = {name: value for name, value in trl_arguments(candidate).items() if name not in MODEL_NAMES}
    if candidate.method_row.needs_beta and not candidate.beta:
        settings.pop("beta", None)  # 0 stands for "not set": the method has no loss at a beta of 0
    lost = {name for name, value in settings.items() if value} - names - model_names
    if lost:
        raise InputError(f"{config.__name__} of the installed TRL has no setting {', '.join(sorted(lost))}.")
    by_script = candidate.method_row.policy_loader == "script"
    settings |= {"model_init_kwargs": None if by_script else inputs.model_init_kwargs}
    return config(
        **{name: value for name, value in (settings | inputs.run_arguments).items() if name in names}
        | TRAINERS[candidate.method].arguments(inputs)
    )


def names_of(candidate: Candidate) -> set[str]:
    """Return the names of the fields of the method's own config."""
    return {field.name for field in fields(_class_of_trl(candidate, candidate.method_row.config))}


def _class_of_trl(candidate: Candidate, name: str) -> Any:
    """Return a class of the installed TRL, by its name in `METHODS`."""
    return getattr(importlib.import_module(candidate.method_row.module), name)


# -- images ------------------------------------------------------------------------------------------------------------


def with_images(collate: Callable[[Any], Any], candidate: Candidate, config: Any) -> Callable[[Any], Any]:
    """Return a collator whose batches of text hold images, too, at the beginning of each row; a token follows each.

    There is no processor without the model's files: the batch gets what the model's processor returns for a row
    (transformers 5.23, models/gemma3/processing_gemma3.py, models/qwen2_5_vl/processing_qwen2_5_vl.py). `config`: the
    model's, of Transformers.
    """
    tower = image_tower(candidate.model, candidate.image_size)
    if tower is None:
        return collate

    def collate_images(examples: Any) -> Any:
        batch = collate(examples)
        tokens = batch["input_ids"]
        types = torch.zeros_like(tokens)
        for image in range(candidate.images_per_row):
            first = image * (tower.text_tokens + 1)
            types[:, first : first + tower.feature_tokens] = 1
        tokens[tokens == config.image_token_id] = 0  # the text of a probe is any tokens
        tokens[types == 1] = config.image_token_id
        return {**batch, **_shown_images(tower, len(tokens) * candidate.images_per_row, types)}

    return collate_images


def _shown_images(tower: ImageTower, images: int, types: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a batch's pixels and their places.

    The pixels are squares (gemma 3), images with their sizes (mistral 3), or patches with their grid (qwen).
    """
    if tower.merger is None:
        side = isqrt(tower.pixels // RGB)
        return {"token_type_ids": types, "pixel_values": torch.zeros(images, RGB, side, side)}
    height, width = tower.grid
    if tower.one_row:
        side = isqrt(tower.pixels // tower.patches // RGB)
        size = (height * side, width * side)
        return {"pixel_values": torch.zeros(images, RGB, *size), "image_sizes": torch.tensor([size] * images)}
    return {
        "mm_token_type_ids": types,
        "pixel_values": torch.zeros(images * tower.patches, tower.pixels // tower.patches),
        "image_grid_thw": torch.tensor([[1, height, width]] * images),
    }


# -- how models are loaded ---------------------------------------------------------------------------------------------


def transformers_config(config: Mapping[str, object]) -> PreTrainedConfig:
    """Return the config object of Transformers that the fields of a config.json stand for, read as it reads that file.

    Raises:
        UnknownArchitecture: Transformers does not know the model type, or refuses a field.
    """
    model_type = str(config["model_type"])
    try:
        fields = {key: _with_infinities(value) for key, value in config.items() if key != "model_type"}
        return AutoConfig.for_model(model_type, **fields)
    except (StrictDataclassError, ValueError) as error:
        raise UnknownArchitecture(f"Transformers refuses the config.json of type {model_type}: {error}") from error


def _with_infinities(value: object) -> object:
    """Return a value of a config.json with its infinities, which JSON does not have, as numbers.

    Source: transformers 5.23, configuration_utils.py, `_encode_special_floats`: {"__float__": "Infinity"}.
    """
    if isinstance(value, dict):
        if value.keys() == {"__float__"}:
            return float(value["__float__"])
        return {key: _with_infinities(each) for key, each in value.items()}
    return [_with_infinities(each) for each in value] if isinstance(value, list) else value


def model_config(candidate: Candidate) -> ModelConfig:
    """Return TRL's description of how the model is loaded and which adapters it gets."""
    names = {field.name for field in fields(ModelConfig)}
    settings = {name: value for name, value in settings_of(candidate).items() if name in names}
    config = ModelConfig(**settings)
    config.lora_task_type = "SEQ_CLS" if candidate.method_row.head == "score" else "CAUSAL_LM"
    # Set again: `__post_init__` makes a list of one name a string, which PEFT takes for a regular expression of the
    # whole path of a module.
    if not is_expression(candidate.lora_target_modules):
        config.lora_target_modules = settings.get("lora_target_modules")
    return config


def quantization_config(inputs: TrainerInputs) -> Any:
    """Return the config with which the model is loaded; None if it is not quantized.

    TRL's own, or that of train.py for a published base (`QuantizationRow.loaded_with`).
    """
    row = inputs.candidate.quantization_row
    if row.kept and row.loaded_with:
        return getattr(transformers, row.loaded_with.name)(**row.loaded_with.arguments)
    return get_quantization_config(model_config(inputs.candidate))


def quantization_by_kwargs(inputs: TrainerInputs) -> dict[str, Any]:
    """Return the arguments of a config whose trainer has none for a quantization; the config has the dtype itself."""
    return {"model_init_kwargs": {"quantization_config": quantization_config(inputs)}}


def packed_attention(inputs: TrainerInputs) -> dict[str, Any]:
    """Return `quantization_by_kwargs`, with an attention that needs no download, as the Hub's FlashAttention 3 does."""
    loading = quantization_by_kwargs(inputs)["model_init_kwargs"]
    return {"model_init_kwargs": {**loading, "attn_implementation": "flash_attention_2"}}


def adapters_in_dtype(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast PEFT's float32 adapters to the dtype of the base model, in place.

    PEFT's `autocast_adapter_dtype=False` leaves them in that dtype, but TRL passes it on under ZeRO-3 only.
    """
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype)


def train_in_float32(model: torch.nn.Module) -> None:
    """Cast the trained parameters to float32, in place, like train.py (`Candidate.script_casts_to_float32`)."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


# -- generation --------------------------------------------------------------------------------------------------------


def full_length_generation(candidate: Candidate) -> dict[str, Any]:
    """Return generation settings with which every completion gets its full length.

    `generate` gets an end token that no model samples; vLLM ignores the end token. `min_new_tokens` would do as well,
    but it keeps another copy of the logits while it forbids the end token.
    """
    return {"eos_token_id": candidate.model.vocab_size} if candidate.vllm == "off" else {"ignore_eos": True}


def set_full_length(trainer: Any, candidate: Candidate) -> None:
    """Let a trainer whose config has no `generation_kwargs` sample full lengths.

    Source: trl 1.16, experimental/gold/gold_trainer.py, `GOLDTrainer.__init__`; generation/vllm_generation.py.
    """
    if candidate.vllm == "off":
        configs = [trainer.generation_config]
        configs += [trainer.value_generation_config] if candidate.method_row.samples_values else []
        for config in configs:
            config.eos_token_id = full_length_generation(candidate)["eos_token_id"]
    else:
        trainer.vllm_generation.generation_kwargs = full_length_generation(candidate)


def no_metrics(_: EvalPrediction) -> dict[str, float]:
    """Compute no metric of an evaluation: the trainer keeps the logits for any function of metrics."""
    return {}


def distinct_rewards(completions: list[Any], **_: Any) -> list[float]:
    """Reward every completion differently, so that every group has an advantage. The signature is TRL's."""
    return [float(index) for index in range(len(completions))]


# -- rows --------------------------------------------------------------------------------------------------------------


def text(tokens: list[int]) -> str:
    """Return the text that our tokenizers turn into these tokens, one word for each."""
    return " ".join(f"w{token}" for token in tokens)


def sft_row(candidate: Candidate, tokens: TokenSource, index: int, short: int) -> dict[str, Any]:
    return {"input_ids": tokens(candidate.max_length - short)}


def preference_row(candidate: Candidate, tokens: TokenSource, index: int, short: int) -> dict[str, Any]:
    """Return a prompt of one token, so that all the rest is scored; TRL adds an end token to both completions."""
    length = candidate.max_length - 2
    return {
        "prompt": text(tokens(1)),
        "chosen": " " + text(tokens(length)),
        "rejected": " " + text(tokens(length - short)),
    }


def triple_row(candidate: Candidate, tokens: TokenSource, index: int, short: int) -> dict[str, Any]:
    """Return a preference row and the right answer, which is as long as the chosen one."""
    return {
        **preference_row(candidate, tokens, index, short),
        "reference": " " + text(tokens(candidate.max_length - 2)),
    }


def kto_row(candidate: Candidate, tokens: TokenSource, index: int, short: int) -> dict[str, Any]:
    """Return a prompt of one token and a completion, to which TRL adds an end token; every other one is desirable.

    A prompt with images is one of messages, and so is its completion, which gets no end token.
    """
    label = index % 2 == 0
    if candidate.images_per_row:
        completion = tokens(candidate.max_length - image_tokens(candidate) - 1 - short)
        answer = [{"role": "assistant", "content": text(completion)}]
        return {**message(candidate, tokens(1)), "completion": answer, "label": label}
    length = candidate.max_length - 2
    return {"prompt": text(tokens(1)), "completion": " " + text(tokens(length - short)), "label": label}


def reward_row(candidate: Candidate, tokens: TokenSource, index: int, short: int) -> dict[str, Any]:
    return {"chosen_ids": tokens(candidate.max_length), "rejected_ids": tokens(candidate.max_length - short)}


def prompt_row(candidate: Candidate, tokens: TokenSource, index: int, short: int) -> dict[str, Any]:
    if candidate.images_per_row:
        return message(candidate, tokens(candidate.prompt_length - image_tokens(candidate) - short))
    return {"prompt": text(tokens(candidate.prompt_length - short))}


def demonstrated_row(candidate: Candidate, tokens: TokenSource, index: int, short: int) -> dict[str, Any]:
    """Return a prompt, and what the teacher's prompt has besides, which is then cut to the same length."""
    return {**prompt_row(candidate, tokens, index, short), "privileged_context": text(tokens(candidate.prompt_length))}


def feedback_row(candidate: Candidate, tokens: TokenSource, index: int, short: int) -> dict[str, Any]:
    """Return a prompt, and feedback as long as the completion that the teacher's prompt usually has besides."""
    feedback = text(tokens(candidate.max_completion_length))
    return {**prompt_row(candidate, tokens, index, short), "privileged_context": feedback}


def message(candidate: Candidate, tokens: list[int]) -> dict[str, Any]:
    """Return a row's prompt as a message, with images of the candidate's size."""
    return {
        "prompt": [{"role": "user", "content": text(tokens)}],
        "images": [image_of(candidate)] * candidate.images_per_row,
    }


def conversation_row(candidate: Candidate, tokens: TokenSource, index: int, short: int) -> dict[str, Any]:
    """Return a prompt as messages; the student's own completion is trained."""
    return {"messages": [{"role": "user", "content": text(tokens(candidate.prompt_length - short))}]}


def gkd_row(candidate: Candidate, tokens: TokenSource, index: int, short: int) -> dict[str, Any]:
    """Return a prompt and a completion; with `lmbda=1.0` the student's own completion replaces it."""
    prompt = tokens(candidate.prompt_length - short)
    completion = tokens(candidate.row_tokens - candidate.prompt_length)
    if candidate.use_uld_loss:  # which tokenizes text, and adds an end
        return {"prompt": text(prompt), "completion": " " + text(completion[1:])}
    return {
        "prompt": text(prompt),
        "input_ids": prompt + completion,
        "completion_mask": [0] * len(prompt) + [1] * len(completion),
    }


# -- trainers ----------------------------------------------------------------------------------------------------------


def sft_arguments(inputs: TrainerInputs) -> dict[str, Any]:
    """Unset `max_length` for padding-free training without packing, which refuses it.

    Source: trl 1.16, sft_trainer.py, `SFTTrainer.__init__`.
    """
    unbounded = inputs.candidate.padding_free and not inputs.candidate.packing
    return {"max_length": None} if unbounded else {}


def generation_arguments(inputs: TrainerInputs) -> dict[str, Any]:
    return {"generation_kwargs": full_length_generation(inputs.candidate)}


def teacher_kwargs(inputs: TrainerInputs) -> dict[str, Any]:
    """Return arguments to load the teacher: the student's, in its own dtype."""
    return {**inputs.model_init_kwargs, "dtype": inputs.candidate.teacher_load_dtype}


def reprompting_arguments(inputs: TrainerInputs) -> dict[str, Any]:
    """Take the feedback of the rows in place of a completion, since no completion of a probe is worth decoding."""
    by_feedback = {"include_environment_feedback": True, "success_reward_threshold": float("inf")}
    return generation_arguments(inputs) | by_feedback


def teacher_arguments(inputs: TrainerInputs) -> dict[str, Any]:
    return {"teacher_model_init_kwargs": teacher_kwargs(inputs)}


def distillation_arguments(inputs: TrainerInputs) -> dict[str, Any]:
    return generation_arguments(inputs) | teacher_arguments(inputs)


def keep_all_prompts(inputs: TrainerInputs) -> dict[str, Any]:
    """Keep prompts without a reward: an emulated card computes no rewards, and A2PO would train on nothing."""
    return {"filter_all_incorrect": False}


def online_dpo_arguments(inputs: TrainerInputs) -> dict[str, Any]:
    """Raise `max_length` to a whole prompt and completion, so that no prompt is cut."""
    candidate = inputs.candidate
    whole = candidate.prompt_length + candidate.max_completion_length
    return generation_arguments(inputs) | {"max_length": max(candidate.max_length, whole)}


def gkd_arguments(inputs: TrainerInputs) -> dict[str, Any]:
    """Train on the student's own completions in every step (`lmbda` 1): the heavier of GKD's two kinds of step.

    With `lmbda` 0 it has the other kind only.
    """
    return {"lmbda": 1.0 if inputs.candidate.generated_share else 0.0, **teacher_arguments(inputs)}


def ppo_arguments(inputs: TrainerInputs) -> dict[str, Any]:
    """Return all steps' prompts, which PPO counts (trl 1.12, experimental/ppo/ppo_trainer.py, `num_total_batches`)."""
    candidate = inputs.candidate
    prompts = candidate.per_device_train_batch_size * candidate.gradient_accumulation_steps * candidate.num_processes
    return {"total_episodes": inputs.run_arguments["max_steps"] * prompts}


def other_teacher(trainer: Any) -> Any:
    """Return the model that teaches the policy; None: the policy itself."""
    return None if trainer.teacher_model is trainer.model else trainer.teacher_model


TRAINERS: dict[MethodName, TrainerRecipe] = {
    "sft": TrainerRecipe(row=sft_row, arguments=sft_arguments),
    "dpo": TrainerRecipe(row=preference_row),
    "kto": TrainerRecipe(row=kto_row, processes_images=True),
    "reward": TrainerRecipe(row=reward_row),
    "grpo": TrainerRecipe(row=prompt_row, arguments=generation_arguments, processes_images=True),
    "rloo": TrainerRecipe(row=prompt_row, arguments=generation_arguments, processes_images=True),
    "gmpo": TrainerRecipe(row=prompt_row, arguments=generation_arguments, processes_images=True),
    "async-grpo": TrainerRecipe(row=prompt_row, arguments=quantization_by_kwargs),
    "a2po": TrainerRecipe(row=prompt_row, arguments=keep_all_prompts, changes_generation_config=True),
    "distillation": TrainerRecipe(row=prompt_row, arguments=distillation_arguments),
    "online-dpo": TrainerRecipe(row=prompt_row, arguments=online_dpo_arguments),
    "cpo": TrainerRecipe(row=preference_row),
    "orpo": TrainerRecipe(row=preference_row),
    "tpo": TrainerRecipe(row=triple_row),
    "gkd": TrainerRecipe(row=gkd_row, arguments=gkd_arguments, changes_generation_config=True),
    "gold": TrainerRecipe(row=gkd_row, arguments=gkd_arguments, changes_generation_config=True),
    "iw-opd": TrainerRecipe(
        row=conversation_row, arguments=teacher_arguments, changes_generation_config=True, chats=True
    ),
    "server-distillation": TrainerRecipe(
        row=prompt_row,
        arguments=lambda inputs: generation_arguments(inputs) | {"teacher_model_server_url": "http://localhost"},
    ),
    "async-distillation": TrainerRecipe(row=prompt_row, arguments=packed_attention),
    "sdft": TrainerRecipe(row=demonstrated_row, arguments=generation_arguments, reference=other_teacher),
    "sdpo": TrainerRecipe(row=feedback_row, arguments=reprompting_arguments, reference=other_teacher),
    "ppo": TrainerRecipe(
        row=lambda candidate, tokens, index, short: {"input_ids": tokens(candidate.prompt_length - short)},
        arguments=ppo_arguments,
    ),
}
assert TRAINERS.keys() == METHODS.keys()
