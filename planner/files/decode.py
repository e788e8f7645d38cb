"""JSON decoded into msgspec types: a wrong document is one line that names the path of the wrong field."""

import re
from contextlib import suppress
from typing import TypeVar

import msgspec

from planner.errors import SHOWN_CHARACTERS, InputError, UnknownName, shortened

T = TypeVar("T")


def decode_json(text: str | bytes, kind: type[T], source: str, hint: str = "") -> T:
    """Decode JSON text into a msgspec type.

    Raises:
        InputError: the text is no JSON, or no document of that type. The message names the path of the wrong field:
            "plan.json: Expected `int`, got `str` - at `$.gpus[0].count`."
        UnknownName: it has a field that the type has not; the message ends with `hint`.
    """
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        _refuse_unknown_field(error, kind, source, hint)
        value: object = None
        if KEY.search(str(error)):
            # The text after the wrong field was not parsed yet, and may be invalid.
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                value = msgspec.json.decode(text)
        raise InputError(f"{source}: {shortened_path(_with_key(error, value, kind))}.") from error
    except RecursionError as error:
        raise InputError(f"{source}: it is nested too deeply.") from error


def convert_json(value: object, kind: type[T], source: str, hint: str = "") -> T:
    """Convert parsed JSON (dicts and lists) into a msgspec type.

    Raises:
        InputError: the value is no document of that type; the message is that of `decode_json`.
        UnknownName: as `decode_json`.
    """
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, OverflowError) as error:  # OverflowError: an integer too large for a float
        _refuse_unknown_field(error, kind, source, hint)
        raise InputError(f"{source}: {shortened_path(_with_key(error, value, kind))}.") from error
    except RecursionError as error:
        raise InputError(f"{source}: it is nested too deeply.") from error


# Source: msgspec 0.22, src/msgspec/_core.c; behind a field of a nested object stands its path, in which any key of a
# dict is "[...]".
UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`")
KEY = re.compile(r" - at `\$\.(\w+)\[\.\.\.\]")


def _with_key(error: Exception, value: object, kind: type) -> str:
    """Return the message of an error; if it is about an entry of a dict, with the key of the entry."""
    message, found = str(error), KEY.search(str(error))
    if found is None or not isinstance(value, dict) or not isinstance(entries := value[found[1]], dict):
        return message
    for key, each in entries.items():
        try:
            msgspec.convert({**value, found[1]: {key: each}}, kind)
        except (msgspec.ValidationError, OverflowError) as alone:
            if str(alone) == message:
                return message.replace("[...]", f"[{shortened(key)}]", 1)
    return message


def _refuse_unknown_field(error: Exception, kind: type, source: str, hint: str) -> None:
    """Raise UnknownName with the nearest fields of a type if an error is about one that it does not have."""
    unknown = UNKNOWN_FIELD.fullmatch(str(error))
    if unknown and isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        raise UnknownName(f"field of {source}", unknown[1], kind.__struct_encode_fields__, hint=hint) from error


def shortened_path(message: str) -> str:
    """Return a message of msgspec on one line; the input that it quotes is cut, the path at its end is kept."""
    cause, dash, path = " ".join(message.split()).partition(" - at ")
    cut = cause if len(cause) <= SHOWN_CHARACTERS else cause[: SHOWN_CHARACTERS - 3] + "..."
    return f"{cut}{dash}{path if len(path) <= SHOWN_CHARACTERS else path[: SHOWN_CHARACTERS - 3] + '...'}"
