"""Models whose weights nobody has to download: folders with a config and a tokenizer, and what `from_pretrained` reads in the place of their weights.

Everything else of loading is the libraries' own: where the model lies, in what dtype, how it is quantized, what ZeRO-3 and FSDP make of it.
"""

import contextlib
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerFast

from planner.models.shape import ModelShape
from probes.step.stage import EOS, PAD, WORD
from probes.substitution import substituted

UNKNOWN = "<unknown>"
SPREAD = 0.02  # standard deviation of the weights: `initializer_range`, as most configs have it
STEP = (
    7  # between the first elements of two rows of a weight: rows differ, and one short line of numbers holds them all
)
NOT_FOUND: tuple[None, None] = (None, None)  # checkpoint files and their index, where nobody has looked


def tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer in which every token is one word, so that what a model has sampled can be read again; its words are `w3`, `w4` and so on."""
    words = {f"w{index}": index for index in range(WORD, vocab_size)}
    made = Tokenizer(WordLevel({"<pad>": PAD, UNKNOWN: PAD + 1, "<eos>": EOS} | words, unk_token=UNKNOWN))
    made.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token=UNKNOWN, padding_side="left"
    )


def model_folder(shape: ModelShape, parent: Path) -> Path:
    """A folder that is the model to everything that loads one by its path, but for its weights."""
    folder = parent / shape.id.replace("/", "--")
    folder.mkdir(parents=True, exist_ok=True)
    fields = dict(shape.config)
    config = AutoConfig.for_model(str(fields.pop("model_type")), **fields)
    written = config.to_dict() | {"pad_token_id": PAD}
    written.pop("quantization_config", None)  # numbers made up are of no published checkpoint
    written["architectures"] = [_architecture(shape, config)]
    (folder / "config.json").write_text(json.dumps(written, default=str), encoding="utf-8")
    tokenizer(shape.vocab_size).save_pretrained(folder)
    return folder


def _architecture(shape: ModelShape, config: Any) -> str:
    """The class that loads the model (trl 1.16, trainer/utils.py, `create_model_from_path` asks the config for it)."""
    return str(getattr(transformers, shape.auto_class)._model_mapping[type(config)].__name__)


@contextlib.contextmanager
def random_weights() -> Iterator[None]:
    """While inside, `from_pretrained` finds random numbers in the shapes of every weight of a folder that has none.

    Source: transformers 5.23, modeling_utils.py: `from_pretrained` asks `_get_resolved_checkpoint_files` for files and gives them to `_load_pretrained_model`,
    which takes a state dict as well and converts, places and quantizes one tensor after another.
    """
    load: Callable[..., Any] = PreTrainedModel._load_pretrained_model

    @functools.wraps(load)
    def load_numbers(
        model: PreTrainedModel, state_dict: Any, checkpoint_files: Any, load_config: Any, **kwargs: Any
    ) -> Any:
        return load(model, numbers(model), checkpoint_files, load_config, **kwargs)

    def find_nothing(*_: Any, **__: Any) -> tuple[None, None]:
        return NOT_FOUND

    with (
        substituted(transformers.modeling_utils, "_get_resolved_checkpoint_files", find_nothing),
        substituted(PreTrainedModel, "_load_pretrained_model", staticmethod(load_numbers)),
    ):
        yield


def numbers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """For each weight a tensor of its shape, all of them views of one line of random numbers: the host holds no second model.

    In float64, which no model is loaded in, so that loading always makes a copy.
    """
    shapes = {name: _shape(held) for name, held in model.state_dict(keep_vars=True).items() if held.is_floating_point()}
    longest = max((_span(shape) for shape in shapes.values()), default=0)
    line = torch.randn(longest, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * SPREAD
    return {name: line.as_strided(shape, _strides(shape)) for name, shape in shapes.items()}


def _shape(held: torch.Tensor) -> tuple[int, ...]:
    """What a weight is as a whole; ZeRO-3 has left a part of it here (deepspeed, runtime/zero/partition_parameters.py, `ds_shape`)."""
    return tuple(vars(held).get("ds_shape", held.shape))


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(1 if dimension == len(shape) - 1 else STEP for dimension in range(len(shape)))


def _span(shape: tuple[int, ...]) -> int:
    """Numbers that a view of this shape reaches."""
    return (
        1 + sum((size - 1) * stride for size, stride in zip(shape, _strides(shape), strict=True)) if all(shape) else 0
    )
