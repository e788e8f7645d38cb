"""The arguments of `plan` and `estimate` in Python: checked and converted to the options of a job, or a trainer."""

from collections.abc import Callable, Mapping
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from msgspec.structs import fields

from planner.errors import InputError, shortened
from planner.jobs.job import Job
from planner.settings.table import SHORTHANDS

if TYPE_CHECKING:
    from planner.requests.options import JobOptions

Options = TypeVar("Options", bound="JobOptions")

# Types of an option -> their names in a message, and the example in it.
WORDS: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    list: "a list of names",
}
# The word for an option's value -> an example of it.
EXAMPLES = {"SIZE": "'64GiB'", "SPEED": "'400Gb'", "VERSION": "'1.16.0'", "CLUSTER": "'2xA100-40G'"}


def options_of(kind: type[Options], given: Mapping[str, Any], asked: Mapping[str, Any]) -> Options:
    """Return the options of a job: those by their names, and every other argument as a setting.

    Raises:
        InputError: an argument has another type than its option or than a setting.
    """
    hints = get_type_hints(kind, include_extras=True)
    flags = {field.name for field in fields(kind)} - {"set"}
    named = {**given, **{name: value for name, value in asked.items() if name in flags}}
    typed = {
        # A setting that has a flag is read as other settings are: "512" is a number too.
        name: _setting(name, value) if name in SHORTHANDS else _option(name, value, hints[name])
        for name, value in named.items()
    }
    settings = {name: _setting(name, value) for name, value in asked.items() if name not in flags}
    return kind(set=settings, **typed)


def _option(name: str, value: Any, hint: Any) -> Any:
    """Return the value of an option in its type; a path becomes text, and a number of NumPy one of Python.

    Raises:
        InputError: it has another type.
    """
    annotated, option = get_args(hint)
    kinds = {getattr(kind, "__origin__", kind) for kind in get_args(annotated) or (annotated,)}
    if value is None and NoneType in kinds:
        return None
    for kind in (bool, int, float, str, list):
        if kind in kinds and (converted := CONVERTERS[kind](value)) is not None:
            return converted
    wanted = " or ".join(word for kind, word in WORDS.items() if kind in kinds)
    example = f", such as {EXAMPLES[option.metavar]}" if option.metavar in EXAMPLES else ""
    raise InputError(f"{name} must be {wanted}{example}, not {_shown(value)}.")


def _setting(name: str, value: Any) -> Any:
    """Return the value of a setting: None, a number, text or a path as text, or a tuple of texts.

    Raises:
        InputError: it is none of them, such as a dict.
    """
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, list | tuple) and all(isinstance(part, str | Real) for part in value):
        return tuple(map(str, value))
    for number in (_whole(value), _number(value)):
        if number is not None:
            return number
    raise InputError(f"{name} must be a number, text, True, False or a list of names, not {_shown(value)}.")


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, Integral) and not isinstance(value, bool) else None


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
    except OverflowError:  # a whole number beyond 1e308
        return float("inf")


def _text(value: Any) -> str | None:
    return str(value) if isinstance(value, str | Path) else None


def _names(value: Any) -> list[str] | None:
    names = [value] if isinstance(value, str) else value
    return list(names) if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) else None


# Type of an option -> the function that returns a value in it; None: the value is no such thing.
CONVERTERS: dict[type, Callable[[Any], Any]] = {bool: _flag, int: _whole, float: _number, str: _text, list: _names}


def _shown(value: Any) -> str:
    """Return a value as a message repeats it: a number or a text itself, else its type."""
    if value is None or isinstance(value, str | int | float):
        return shortened(value)
    return f"a {type(value).__name__}"


def job_from_trainer(trainer: Any, **settings: Any) -> Job:
    """Return the job of a TRL trainer, with every setting pinned that the trainer shows.

    `settings`: what a trainer does not show, such as `prompt_length=512` of methods that generate.

    Raises:
        PlanError: a setting that memory depends on cannot be read, or the extra training is not installed.
    """
    from planner.training_stack import trainer_job

    return trainer_job(trainer, settings)
