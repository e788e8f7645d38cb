"""Token counts of a dataset's rows, tokenized as TRL's trainers do.

Source: trl 1.16, trainer/sft_trainer.py and dpo_trainer.py, `_prepare_dataset`.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import datasets
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl.data_utils import _tokenize, maybe_convert_to_chatml

from planner.errors import InputError, shortened

# Ending of a file -> the builder of `datasets.load_dataset`.
BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
COLUMNS = "messages, text, prompt and completion, chosen and rejected, prompt, or input_ids"


def row_counts(name: str, split: str, text_field: str, tokenizer_path: str) -> tuple[int, ...]:
    """Return the tokens of every row of a dataset in its order: two rows for a pair of chosen and rejected.

    `name`: a file, a folder that `save_to_disk` wrote, or a dataset of the Hub.

    Raises:
        InputError: the dataset or the tokenizer cannot be loaded, or a row has none of TRL's formats.
    """
    rows, tokenizer = _dataset(name, split), _tokenizer(tokenizer_path)
    try:
        return tuple(_counts(rows, tokenizer, text_field))
    except (ValueError, TypeError, KeyError) as error:  # of a chat template, or of a row in another form
        raise InputError(f"{shortened(name)} cannot be tokenized: {shortened(error)}.") from error


def _dataset(name: str, split: str) -> Iterable[Mapping[str, Any]]:
    path = Path(name)
    try:
        if path.is_file():
            builder = BUILDERS.get(path.suffix.lower(), "text")
            return datasets.load_dataset(builder, data_files=name, split="train")  # type: ignore[no-any-return]
        if any((path / file).is_file() for file in ("dataset_info.json", "dataset_dict.json")):
            saved = datasets.load_from_disk(name)
            return saved[split] if isinstance(saved, datasets.DatasetDict) else saved  # type: ignore[no-any-return]
        return datasets.load_dataset(name, split=split)  # type: ignore[no-any-return]
    except (OSError, ValueError, KeyError, StopIteration, datasets.exceptions.DatasetsError) as error:
        reason = shortened(error.__cause__ or error) or "it is empty"
        raise InputError(f"The dataset {shortened(name)} cannot be loaded: {reason}.") from error


def _tokenizer(path: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise InputError(
            f"The tokenizer of {shortened(path)} cannot be loaded: {shortened(error)}. Give a folder with its "
            "tokenizer.json as --model."
        ) from error


def _counts(rows: Iterable[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase, text_field: str) -> Iterator[int]:
    """Yield the tokens of every row."""
    for example in rows:
        if "input_ids" in example:
            yield len(example["input_ids"])
            continue
        chatml = maybe_convert_to_chatml(dict(example))
        for row in _rows(chatml, text_field, tokenizer.eos_token or ""):
            yield len(_tokenize(tokenizer, row, **_template_arguments(chatml, row))["input_ids"])


def _rows(example: Mapping[str, Any], text_field: str, eos: str) -> Iterator[Any]:
    """Yield the texts, or lists of messages, that an example is trained on; texts end with `eos`.

    A prompt alone is that of a method that generates, and ends with itself.

    Raises:
        InputError: the example has no column that TRL reads.
    """
    prompt = example.get("prompt")
    answers = [example[name] for name in ("chosen", "rejected", "completion") if name in example]
    whole = next((example[name] for name in ("messages", text_field) if name in example), None)
    if not answers and whole is not None:
        answers, prompt = [whole], None
    if not answers and prompt is None:
        raise InputError(
            f"A row has the columns {shortened(', '.join(example))}. TRL reads {COLUMNS}; name the column of a text "
            "with --text-field."
        )
    for answer in answers or [prompt]:
        row = answer if prompt is None or not answers else prompt + answer
        if not isinstance(row, str | list):
            raise TypeError(f"{row} is neither a text nor a list of messages")
        yield row if isinstance(row, list) or not answers or row.endswith(eos) else row + eos


def _template_arguments(example: Mapping[str, Any], row: Any) -> dict[str, Any]:
    """Return the arguments of a chat template; a prompt alone ends with the beginning of an answer."""
    if not isinstance(row, list):
        return {}
    tools = example.get("tools")
    given = {"tools": json.loads(tools) if isinstance(tools, str) else tools, **example.get("chat_template_kwargs", {})}
    alone = not {"completion", "chosen", "messages"} & example.keys()
    return given | ({"add_generation_prompt": True} if alone else {})
