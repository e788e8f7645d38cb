"""Token counts of rows from files: text, CSV, JSON lines, parquet, or a dataset that `save_to_disk` wrote."""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from os.path import isdir
from pathlib import Path
from typing import Any

from planner.errors import InputError, shortened
from planner.files.read import MAX_LINES_BYTES, open_regular, read_text
from planner.rows.lengths import EXAMPLE, LENGTHS, MOST_TOKENS, RowLengths, counted_lengths, is_words, lengths_in_words

# Columns of counts, the first that a file has, and columns of tokens, whose length is the count.
COUNT_COLUMNS = ("length", "lengths", "tokens", "num_tokens", "n_tokens", "token_count", "seq_length")
TOKEN_COLUMNS = ("input_ids",)
COUNTED_BY = "plan lengths counts the tokens of texts and messages: plan lengths FILE --model NAME."
COUNTED_ROWS = 10_000  # rows of tokens that are in memory at a time


def row_lengths(text: str, option: str = LENGTHS) -> RowLengths:
    """Return the lengths of `--lengths`, or of another option: quantiles in words, or a file of counts.

    Raises:
        InputError: the words are no quantiles, or the file cannot be read or holds no counts.
    """
    if is_words(text):
        return lengths_in_words(text, option)
    path = Path(text)
    try:
        status = path.stat()
    except (OSError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or str(error)
        raise InputError(
            f"{option} {shortened(text)} cannot be read: {reason}. It is a file of token counts, or quantiles such as "
            f"{EXAMPLE}."
        ) from error
    return _read(text, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=8)
def _read(text: str, changed_ns: int, size: int) -> RowLengths:
    """Return the counts of a file. Cached by the time of its last change: a request reads its options several times."""
    path = Path(text)
    reader = _read_dataset if isdir(path) else READERS.get(path.suffix.lower(), _read_plain)
    counts = [_count(value, path, number) for number, value in enumerate(reader(path), 1)]
    if not any(counts):
        raise InputError(f"{shortened(path)} holds no row with a token.")
    return counted_lengths(tuple(counts))


def _count(value: Any, path: Path, number: int) -> int:
    """Return a value of a file as a count: a whole number, or the length of a list of tokens.

    Raises:
        InputError: it is neither; names the row.
    """
    if isinstance(value, Sequence) and set(map(type, value)) <= {int}:
        return len(value)
    try:
        count = int(value)
        if isinstance(value, bool) or count != float(value) or not 0 <= count <= MOST_TOKENS:
            raise ValueError
    except (ValueError, TypeError, OverflowError):
        said = f"{shortened(path)}, row {number}: {shortened(value)} is no number of tokens."
        raise InputError(f"{said} {COUNTED_BY}") from None
    return count


def _column(names: Sequence[str], path: Path) -> str:
    """Return the name of the column to read: a known one, or the only one.

    Raises:
        InputError: no column is known.
    """
    found = next((name for name in (*COUNT_COLUMNS, *TOKEN_COLUMNS) if name in names), None)
    if found is None and len(names) == 1:
        found = names[0]
    if found is None:
        raise InputError(
            f"{shortened(path)} has no column of token counts, but {shortened(', '.join(map(str, names)))}. Name it "
            f"length. {COUNTED_BY}"
        )
    return found


def _read_plain(path: Path) -> Iterator[str]:
    """Yield the numbers of a text, one a line."""
    return (line.strip() for line in read_text(path, MAX_LINES_BYTES).splitlines() if line.strip())


def _read_json_lines(path: Path) -> Iterator[Any]:
    """Yield the count of each line: a number, a list of tokens, or an object with a column of them."""
    name = ""
    for number, line in enumerate(_read_plain(path), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{shortened(path)}, row {number}: that is no JSON.") from error
        if isinstance(row, dict):
            name = name if name in row else _column(list(row), path)
            yield row[name]
        else:
            yield row


def _read_json(path: Path) -> Iterator[Any]:
    """Yield the counts of one JSON document: a list of numbers, or an object with such a list."""
    try:
        document = json.loads(read_text(path, MAX_LINES_BYTES))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{shortened(path)} is no JSON.") from error
    values = document[_column(list(document), path)] if isinstance(document, dict) and document else document
    if not isinstance(values, list):
        raise InputError(f"{shortened(path)} holds no list of token counts.")
    return iter(values)


def _read_csv(path: Path) -> Iterator[str]:
    """Yield the column of counts; a file whose first line is a number has no header."""
    text = read_text(path, MAX_LINES_BYTES)
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    try:
        lines = [row for row in csv.reader(text.splitlines(), delimiter=separator) if row]
    except csv.Error as error:
        raise InputError(f"{shortened(path)} is no CSV: {error}.") from error
    if not lines:
        return iter(())
    if len(lines[0]) == 1 and lines[0][0].strip().isdecimal():
        return (row[0] for row in lines)
    place = lines[0].index(_column(lines[0], path))
    return (row[place] if place < len(row) else "" for row in lines[1:])


def _read_parquet(path: Path) -> Iterator[Any]:
    """Yield the column of counts of a parquet file.

    Raises:
        InputError: pyarrow is not installed, or it cannot read the file.
    """
    try:
        parquet = import_module("pyarrow.parquet")
    except ImportError as error:
        raise InputError(
            f"{shortened(path)} needs pyarrow: pip install pyarrow. Or give the counts as text, one a line."
        ) from error
    with open_regular(path) as file:
        try:
            opened = parquet.ParquetFile(file)
            name = _column(opened.schema_arrow.names, path)
            parts = opened.iter_batches(columns=[name], batch_size=COUNTED_ROWS)
            return iter([count for part in parts for count in _counts(part.column(name), path)])
        except (OSError, ValueError) as error:  # parents of pyarrow's own classes
            raise InputError(f"{shortened(path)} is no parquet file: {shortened(error)}.") from error


def _counts(column: Any, path: Path) -> Iterator[Any]:
    """Yield the numbers of a column of pyarrow, or the lengths of its lists of tokens, which make no Python objects.

    Raises:
        InputError: the column has neither.
    """
    types, compute = import_module("pyarrow.types"), import_module("pyarrow.compute")
    kind = column.type
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        column, kind = compute.list_value_length(column), kind.value_type
    if not types.is_integer(kind) and not types.is_floating(kind):
        raise InputError(f"{shortened(path)} has {shortened(column.type)}, no numbers of tokens. {COUNTED_BY}")
    yield from column.to_pylist()


def _read_dataset(path: Path) -> Iterator[Any]:
    """Yield the counts of a dataset that `save_to_disk` wrote; of several splits it is `train`.

    Raises:
        InputError: datasets is not installed, or the folder holds no dataset.
    """
    folder = path if (path / "dataset_info.json").is_file() else path / "train"
    if not (folder / "dataset_info.json").is_file():
        raise InputError(f"{shortened(path)} is a folder without a dataset that save_to_disk wrote.")
    try:
        dataset = import_module("datasets").load_from_disk(str(folder))
        name = _column(list(dataset.column_names), path)
        parts = dataset.with_format("arrow").iter(COUNTED_ROWS)
        return iter([count for part in parts for count in _counts(part.column(name), path)])
    except ImportError as error:
        raise InputError(f"{shortened(path)} needs datasets: pip install datasets.") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # of a damaged file
        raise InputError(f"{shortened(path)} holds no dataset that can be read: {shortened(error)}.") from error


# Ending of a file -> its reader; other files are text.
READERS: dict[str, Callable[[Path], Iterator[Any]]] = {
    ".jsonl": _read_json_lines,
    ".ndjson": _read_json_lines,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}
