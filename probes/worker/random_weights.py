"""Random weights for probes, so that no model has to be downloaded.

`model_folder` writes a config and a tokenizer; inside `random_weights` `from_pretrained` loads random numbers.
Everything else of loading is done by the libraries: the device, the dtype, the quantization, the sharding by ZeRO-3 and
FSDP.
"""

import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split, WhitespaceSplit
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import Transpose, WeightConverter
from transformers.pytorch_utils import Conv1D

from planner.errors import InputError
from planner.models.shape import ModelShape
from probes.processors import Processor, processor_of, read_processor, write_processor
from probes.step.built_trainer import EOS, PAD, WORD
from probes.substitution import substituted
from probes.trainers import transformers_config

UNKNOWN = "<unknown>"
SPREAD = 0.02  # standard deviation of the weights: `initializer_range`, as most configs have it
PACKED = torch.int32  # the dtype of packed 4-bit weights, zero points and group indices of a GPTQ checkpoint
GROUPS = "g_idx"  # the index of the group of each input of a layer
# Numbers between the first elements of two rows of a weight: rows differ, and all are views of one short line.
STEP = 7
STORED_BYTES = {"BF16": 2, "F16": 2, "I32": 4}  # by the names of safetensors
NOT_FOUND: tuple[None, None] = (None, None)  # no checkpoint files, and no index of them


def tokenizer(vocab_size: int, processor: Processor | None = None) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one word for each token: `w3`, `w4` and so on, but for the tokens of a processor.

    A sampled completion can be decoded and encoded again. As tokenizers of bytes it puts no spaces between words, which
    GOLD demands to compare tokenizers (trl 1.16, experimental/utils.py, `is_byte_level_tokenizer`, `piece_byte_len`).
    """
    special = processor.tokens if processor else {}
    words = {special.get(index, f"w{index}"): index for index in range(WORD, vocab_size)}
    tokens = Tokenizer(WordLevel({"<pad>": PAD, UNKNOWN: PAD + 1, "<eos>": EOS} | words, unk_token=UNKNOWN))
    bytes_alone = ByteLevel(add_prefix_space=False, use_regex=False)
    tokens.pre_tokenizer = Sequence([WhitespaceSplit(), Split(Regex(r"w\d+"), "isolated"), bytes_alone])
    tokens.decoder = decoders.ByteLevel()
    named: dict[str, Any] = {"extra_special_tokens": processor.named or list(special.values())} if processor else {}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>", unk_token=UNKNOWN, padding_side="left", **named
    )


def model_folder(shape: ModelShape, parent: Path) -> Path:
    """Write a folder from which a model can be loaded by path, but for its weights; return the folder."""
    folder = parent / shape.id.replace("/", "--")
    folder.mkdir(parents=True, exist_ok=True)
    config = transformers_config(shape.config)
    written = config.to_dict() | {"pad_token_id": PAD, "dtype": shape.dtype}  # "auto" would look into the weights
    written.pop("quantization_config", None)  # random weights are not quantized like a published checkpoint
    if shape.quantization_row.made_up:
        # vLLM would look for the quantized layers in the checkpoint's files, of which this folder has none
        # (vllm 0.31, model_executor/layers/quantization/auto_gptq.py, `AutoGPTQConfig.maybe_update_config`)
        names = sorted({linear.name for layer, _ in shape.layer_kinds for linear in layer.linears})
        written["quantization_config"] = {
            **shape.quantization_row.made_up,
            "group_size": shape.quantization_group_size,
            "modules_in_block_to_quantize": [names],
        }
    written["architectures"] = [_architecture(shape, config)]
    (folder / "config.json").write_text(json.dumps(written, default=str), encoding="utf-8")
    processor = processor_of(shape, config)
    tokens = tokenizer(shape.vocab_size, processor)
    tokens.save_pretrained(folder)
    if processor is not None:
        write_processor(processor, tokens, folder)
    return folder


def made_up_processor(shape: ModelShape, parent: Path) -> ProcessorMixin:
    """Write a folder for a vision-language model, and load its processor from there, with our tokenizer.

    Raises:
        InputError: the model takes no images, or torchvision or Pillow is not installed.
    """
    processor = processor_of(shape, transformers_config(shape.config))
    if processor is None:
        raise InputError(f"{shape.id} takes no images that a probe could show it.")
    tokens = tokenizer(shape.vocab_size, processor)
    tokens.chat_template = processor.chat_template
    return read_processor(model_folder(shape, parent), tokens)


def write_sparse_checkpoint(folder: Path) -> None:
    """Write the folder's model as one safetensors file of zeros: a hole, which takes no space on the disk.

    Weights are bfloat16, those of a GPTQ checkpoint packed (`_packed`). Format: huggingface/safetensors, README.md (the
    header's length in 8 bytes, a JSON header, the tensors).

    Leaves out that published mixtures of experts have a tensor for each expert; this file has one for all of a layer.
    """
    config = AutoConfig.from_pretrained(folder)
    architecture = getattr(transformers, config.architectures[0])  # as `model_folder` wrote it
    with torch.device("meta"):
        model = architecture._from_config(config, dtype=torch.bfloat16)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    stored = getattr(config, "quantization_config", {})
    packed = {name for names in stored.get("modules_in_block_to_quantize", ()) for name in names}
    for name, _, shape in _published(model):
        layer, _, last = name.rpartition(".")
        tensors = {name: ("BF16", shape)}
        if last == "weight" and layer.rpartition(".")[2] in packed:
            tensors = {f"{layer}.{part}": each for part, each in _packed(shape, **stored).items()}
        for part, (dtype, sizes) in tensors.items():
            start, end = end, end + STORED_BYTES[dtype] * math.prod(sizes)
            header[part] = {"dtype": dtype, "shape": sizes, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _packed(shape: tuple[int, ...], bits: int, group_size: int, **_: object) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return the tensors of a GPTQ checkpoint in the place of a weight: their dtypes and shapes.

    Source: gptqmodel 7.6, nn_modules/qlinear/__init__.py, `BaseQuantLinear`.
    """
    outputs, inputs = shape
    a_word, groups = 32 // bits, -(-inputs // group_size)
    return {
        "qweight": ("I32", (inputs // a_word, outputs)),
        "qzeros": ("I32", (groups, outputs // a_word)),
        "scales": ("F16", (groups, outputs)),
        "g_idx": ("I32", (inputs,)),
    }


def _architecture(shape: ModelShape, config: Any) -> str:
    """Return the name of the class that loads the model.

    Source: trl 1.16, trainer/utils.py: `create_model_from_path` reads it in the config.
    """
    return str(getattr(transformers, shape.auto_class)._model_mapping[type(config)].__name__)


@contextlib.contextmanager
def random_weights(written: bool = True) -> Iterator[None]:
    """Let `from_pretrained` load random numbers in the shape of every weight inside the block.

    `written`: False leaves their memory as it is, which costs nothing, for cards on which no kernel reads it.

    Source: transformers 5.23, modeling_utils.py: `from_pretrained` gets the checkpoint files from
    `_get_resolved_checkpoint_files` and passes them to `_load_pretrained_model`, which also takes a state dict, and
    converts, places and quantizes one tensor after another.
    """
    load: Callable[..., Any] = PreTrainedModel._load_pretrained_model

    @functools.wraps(load)
    def load_random(
        model: PreTrainedModel, state_dict: Any, checkpoint_files: Any, load_config: Any, **kwargs: Any
    ) -> Any:
        numbers = random_state_dict(model) if written else unwritten_state_dict(model)
        return load(model, numbers, checkpoint_files, load_config, **kwargs)

    def find_nothing(*_: Any, **__: Any) -> tuple[None, None]:
        return NOT_FOUND

    with (
        substituted(transformers.modeling_utils, "_get_resolved_checkpoint_files", find_nothing),
        substituted(PreTrainedModel, "_load_pretrained_model", staticmethod(load_random)),
    ):
        yield


def random_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a tensor of each weight's shape, all of them views of one line of random numbers.

    So the host holds no second model. They are float64, in which no model is loaded, so that loading always makes a
    copy.
    """
    weights = list(_published(model))
    shapes = {name: shape for name, weight, shape in weights if weight.is_floating_point()}
    longest = max((_span(shape) for shape in shapes.values()), default=0)
    line = torch.randn(longest, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * SPREAD
    packed = {name: _groups(weight) for name, weight, _ in weights if name not in shapes}
    return {name: line.as_strided(shape, _strides(shape)) for name, shape in shapes.items()} | packed


def unwritten_state_dict(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a tensor of each weight's shape and dtype in memory that nobody has written."""
    return {
        name: _groups(weight) if name.endswith(GROUPS) else torch.empty(shape, dtype=weight.dtype)
        for name, weight, shape in _published(model)
    }


def _groups(weight: torch.Tensor) -> torch.Tensor:
    """Return zeros for integers of a GPTQ checkpoint: its `g_idx` must be numbers of groups.

    Source: gptqmodel 7.6, nn_modules/qlinear/tritonv2.py, `_validate_g_idx_bounds`.
    """
    return torch.zeros(_shape(weight), dtype=weight.dtype)


def _published(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
    """Yield the weights that a published checkpoint has, none that is tied to another, with their shapes there.

    Those of GPT-2's `Conv1D` are inputs x outputs: a layer of bitsandbytes in its place gets them transposed. Experts
    of Qwen3-VL are published transposed, and ZeRO-3, which hides a parameter's shape, always turns them.
    Source: transformers 5.23, modeling_utils.py, `all_tied_weights_keys`; integrations/bitsandbytes.py,
    `Bnb4bitQuantize.convert` (`source_cls`); conversion_mapping.py (`qwen3_vl_moe`); core_model_loading.py,
    `Transpose.convert`.
    """
    tied = vars(model).get("all_tied_weights_keys", {})
    layers = {path: vars(layer).get("source_cls", torch.nn.Linear) for path, layer in model.named_modules()}
    turned = _turned(model)
    for name, weight in model.state_dict(keep_vars=True).items():
        if (weight.is_floating_point() or weight.dtype == PACKED) and name not in tied:
            path, _, last = name.rpartition(".")
            if last == "weight" and issubclass(layers.get(path, torch.nn.Linear), Conv1D):
                yield name, weight, _shape(weight)[::-1]
            elif name.endswith(turned):
                experts, *matrix = _shape(weight)
                yield name, weight, (experts, *reversed(matrix))
            else:
                yield name, weight, _shape(weight)


def _turned(model: torch.nn.Module) -> tuple[str, ...]:
    """Return how the names of weights end whose last two dimensions a checkpoint has in the other order."""
    conversions = get_model_conversion_mapping(model) if isinstance(model, PreTrainedModel) else []
    return tuple(
        target
        for conversion in conversions
        if isinstance(conversion, WeightConverter)
        and any(isinstance(step, Transpose) and step.check_dims for step in conversion.operations)
        for target in conversion.target_patterns
    )


def _shape(weight: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the whole weight, of which ZeRO-3 keeps only a part in the process.

    Source: deepspeed 0.19.8, runtime/zero/partition_parameters.py (`ds_shape`).
    """
    return tuple(vars(weight).get("ds_shape", weight.shape))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if dimension == len(shape) - 1 else STEP for dimension in range(len(shape)))


def _span(shape: tuple[int, ...]) -> int:
    """Return how many numbers of the line a view of this shape spans."""
    return (
        1 + sum((size - 1) * stride for size, stride in zip(shape, _strides(shape), strict=True)) if all(shape) else 0
    )
