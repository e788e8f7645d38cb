"""Values of settings: a text, or a value of YAML, in the type and bounds of the setting."""

import re
from functools import cache
from typing import Literal, NoReturn, get_args, get_origin, get_type_hints

from planner.candidate import FIELDS, MODEL_FIELDS, Candidate, Elements, Padding
from planner.errors import InputError, UnknownName, shortened
from planner.methods import release
from planner.models.image_tower import image_sides
from planner.rows.lengths import RowLengths, counted_lengths
from planner.rows.reading import row_lengths
from planner.settings.setting import COUNT, MAX_BATCH_SIZE, Setting, Value
from planner.settings.table import ALIASES, FIELD_OF_SETTING, RELEASES, ROW_LENGTHS, SETTING_OF, SPELLINGS

MAX_DIGITS = 20  # of any whole number that a user can mean
WRITTEN_DIGITS = 4_000  # below sys.int_info.default_max_str_digits, beyond which str() raises
OWN_FLAGS = ("method", "trl_version")  # Candidate fields that have a flag and cannot be given by --set
# A value of `dtype`: that of the published weights (transformers/modeling_utils.py, `PreTrainedModel.from_pretrained`).
AUTO = "auto"
OWN_WORDS: dict[object, str] = {
    Elements: AUTO,
    Padding: "either",
}  # the word that such a field accepts besides numbers, true or false
MAX_LISTED_CHOICES = 10  # an error lists all choices up to this number, else the most similar one
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


@cache
def field_types() -> dict[str, object]:
    """Return every Candidate field that `--set` can set, with its type; a model is set by its name."""
    hints = get_type_hints(Candidate)
    texts = (*MODEL_FIELDS, *ROW_LENGTHS)
    return {name: str if name in texts else hints[name] for name in FIELDS if name not in OWN_FLAGS}


def typed_value(name: str, value: Value) -> Value:
    """Return a value of a setting or Candidate field in the setting's type, checked as by `--set`.

    Raises:
        InputError: the value has another type or is out of range.
        UnknownName: the value is none of the setting's choices.
    """
    if ALIASES.get(name, name) in MODEL_FIELDS or value is None:
        return value
    return parse_value(name, value)


def _type_of(name: str) -> object:
    """Return the type of a setting by any of its names."""
    if name not in FIELD_OF_SETTING:
        return field_types()[ALIASES.get(name, name)]
    return type(next(row[name] for row in SPELLINGS[FIELD_OF_SETTING[name]].values() if name in row))


def parse_value(name: str, value: Value) -> Value:
    """Convert a value from text or YAML to the type of the setting.

    Raises:
        InputError: the value has another type or is out of range.
        UnknownName: the value is none of the setting's choices.
    """
    kind = _type_of(name)
    field = ALIASES.get(name, name)
    if field in ROW_LENGTHS:
        return _row_lengths(name, value)
    row = SETTING_OF.get(field)
    text = _minor(field, value, get_args(kind)) if field in RELEASES else as_text(value)
    text = (row.value_aliases.get(text, text) if row else text).strip()
    if field == "dtype" and text == AUTO:
        return AUTO
    if get_origin(kind) is Literal:
        return _one_of(name, text, get_args(kind))
    if text == OWN_WORDS.get(kind):
        return text
    if kind in (bool, Padding):
        return _boolean(name, text, "true or false" if kind is bool else "true, false or either")
    if kind in (int, float, Elements):
        return _number(name, text, row, whole=kind is not float)
    if get_origin(kind) is tuple:
        return tuple(part for part in text.replace(",", " ").split() if part)
    return _checked_text(name, field, text)


def _row_lengths(name: str, value: Value) -> RowLengths | None:
    """Return the lengths of rows of a file, of quantiles in words, or of a list of counts.

    Raises:
        InputError: it is none of them.
    """
    if value is None or isinstance(value, RowLengths):
        return value
    if isinstance(value, tuple):
        if not all(part.isascii() and part.isdecimal() for part in value):
            raise InputError(f"{name} must be numbers of tokens, not {shortened(', '.join(value))}.")
        return counted_lengths(tuple(map(int, value)))
    return row_lengths(_text(value), f"--{name.replace('_', '-')}")


def _checked_text(name: str, field: str, text: str) -> str:
    """Return the text of a setting that is none of a few choices: a model's name, or the size of an image."""
    if field == "image_size":
        return "x".join(map(str, image_sides(text)))
    if field in MODEL_FIELDS and not text:
        raise InputError(f"{name} has no value. Give the name of a model.")
    return text


def _minor(field: str, value: Value, planned: tuple[str, ...]) -> str:
    """Return a release without its patch, and with the zero that YAML and JSON drop from a number such as 0.30."""
    text = as_text(value).strip()
    found = re.fullmatch(r"(\d+\.\d+)(\.\d+)*", text)
    text, releases = (found[1] if found else text), {*planned, *RELEASES[field]}
    return f"{text}0" if isinstance(value, float) and text not in releases and f"{text}0" in releases else text


def _one_of(name: str, text: str, choices: tuple[str, ...]) -> str:
    """Return the text if it is one of the choices; raise UnknownName, or InputError for a release, otherwise."""
    if text not in choices:
        field = ALIASES.get(name, name)
        if field in RELEASES and re.fullmatch(r"\d+\.\d+", text):
            _refuse_release(name, text, sorted({*RELEASES[field], *choices} - {"newest"}, key=release))
        hint = f"{name} can be {', '.join(choices)}." if len(choices) <= MAX_LISTED_CHOICES else ""
        if not hint and field in RELEASES:
            word, first, *_, last = choices
            hint = f"{name} can be {word}, or {first} to {last}."
        raise UnknownName(name, text, choices, hint=hint)
    return text


def _refuse_release(name: str, text: str, planned: list[str]) -> NoReturn:
    """Raise InputError for a release that is not planned, with the nearest one that is. `planned`: oldest first."""
    if release(text) < release(planned[0]):
        raise InputError(f"{name} {text} is older than {planned[0]}, the oldest release that is planned.")
    raise InputError(f"{name} {text} is newer than {planned[-1]}, the newest release that is planned.")


def _boolean(name: str, text: str, wanted: str) -> bool:
    """Parse true, yes, on, 1 or false, no, off, 0; raise InputError otherwise."""
    if text.lower() not in (*_TRUE, *_FALSE):
        _refuse(name, text, wanted)
    return text.lower() in _TRUE


def _number(name: str, text: str, row: Setting | None, whole: bool) -> int | float:
    """Parse a number within the setting's bounds; raise InputError otherwise. `vllm_max_model_length=none` is 0."""
    if text.lower() in ("none", "null") and row is SETTING_OF["vllm_max_model_length"]:
        return 0  # vLLM takes the model's whole context
    try:
        number = _whole(text) if whole else float(text)
    except (ValueError, OverflowError):
        wanted = "one number a run" if "," in text else "a whole number" if whole else "a number"
        _refuse(name, text, wanted)
    low, high = (row and row.bounds) or COUNT  # no row: one of several settings that spell a field, such as zero_stage
    if not low <= number <= high:
        bound = f"at most {high:,}" if number > high else f"at least {low:g}"
        _refuse(name, text, f"from {low:g} to {high:g}" if high < MAX_BATCH_SIZE else bound)
    return number


def _whole(text: str) -> int:
    """Parse 500000000, 500_000_000, 5e8 or 500000000.0; raise ValueError otherwise."""
    if ("e" in text.lower() or text.endswith(".0")) and float(text).is_integer():
        return int(float(text))
    return int(text.replace("_", ""))


def _refuse(name: str, text: str, wanted: str) -> NoReturn:
    raise InputError(f"{name} must be {wanted}, not {shortened(text) or 'empty'}.")


def as_text(value: object) -> str:
    """Return a value as text, the parts of a list separated by spaces."""
    return " ".join(map(str, value)) if isinstance(value, (tuple, list)) else _text(value)


def _text(value: object) -> str:
    """Return a value as YAML writes it; a whole number of more digits than Python writes as infinity."""
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if not isinstance(value, int) or abs(value) < 10**WRITTEN_DIGITS else "inf"
