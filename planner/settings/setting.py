"""The type of a row of the settings table, and the bounds of numbers."""

from collections.abc import Mapping
from typing import Literal

import msgspec
from msgspec import Struct

from planner.rows.lengths import RowLengths

Value = str | int | float | bool | tuple[str, ...] | RowLengths | None
Bounds = tuple[int | float, int | float]

Role = Literal[
    "question",  # the model, the method, the release, and whether a run goes on
    "data",  # a fact of the dataset
    "learning",  # changes what is learned: without it the answer is about another training
    "run",  # changes memory and speed only
]
Search = Literal[
    "never",  # only the user decides
    "choice",  # one of a few values (planner/search/knobs.py)
    "size",  # a number that grows until the memory is full
    "length",  # a size with `--optimize max-length`, else never
    "derived",  # follows from other settings
]
# Where a setting is written for a launch.
File = Literal[
    "trl",  # the method's config class, or TRL's ModelConfig
    "checkpointing",  # the key `gradient_checkpointing_kwargs` there
    "loading",  # the key `model_init_kwargs` there
    "accelerate",  # accelerate's launch file
    "deepspeed",  # DeepSpeed's file
    "server",  # an option of `trl vllm-serve`
    "environment",  # an environment variable
    "requirements",  # requirements.txt
    "code",  # an argument in the training script that no config class has
    "checkpoint",  # the published checkpoint's config.json
    "data",  # nowhere: the dataset has it
    "command",  # nowhere: the command is for it
]
Shown = Literal["always", "if it differs", "never"]

# Largest plausible values: of a batch size in samples, of a DeepSpeed size in elements, of any other number.
MAX_BATCH_SIZE, MAX_ELEMENTS, MAX_NUMBER = 10**6, 10**15, 10**9
COUNT: Bounds = (1, MAX_NUMBER)
BOUNDS: dict[str, Bounds] = {
    "count": COUNT,
    "from zero": (0, MAX_NUMBER),
    "batch": (1, MAX_BATCH_SIZE),
    "elements": (1, MAX_ELEMENTS),
    "elements from zero": (0, MAX_ELEMENTS),
}


class Name(Struct, frozen=True, kw_only=True):
    """One of several settings of the libraries that spell one field, where it differs from its row."""

    file: File
    sentence: str


class Setting(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One row: a field of `Candidate`, its names in the libraries, its bounds, its role and its place in a report.

    `written`: the name in files and reports that we write, if it is not the field's. `aliases`: names that are accepted
    besides, such as those of older releases. `values`: for a field that is several settings of a library, their values
    by the field's value; a setting that a row does not name is off or unset, and if several rows agree with the
    settings of a user, the first one counts. `value_aliases`: other spellings of values.

    `within`: the bounds of a number, or their name in `BOUNDS`. `owner`: the field whose detail this one is; it is
    dropped and freed together with it. `owner_values`: the owner's values with which the libraries read it; empty: with
    all. `owner_has`: a column that rows of the owner's table must have for it, instead of names. `methods`: the column
    of `METHODS` or the condition (`CONDITIONS`) of methods that have it; empty: all. `needs`: a property of `Candidate`
    that must be true for it to be read, as a dotted name. `unset`: the value with which it is not shown, as the
    libraries then behave as without it. `source`: of the names and bounds.
    """

    field: str
    sentence: str
    role: Role
    search: Search = "never"
    file: File = "trl"
    within: str | Bounds = ""
    written: str = ""
    aliases: tuple[str, ...] = ()
    values: Mapping[str | bool, Mapping[str, Value]] = msgspec.field(default_factory=dict)
    value_aliases: Mapping[str, str] = msgspec.field(default_factory=dict)
    names: Mapping[str, Name] = msgspec.field(default_factory=dict)
    owner: str = ""
    owner_values: tuple[str | bool, ...] = ()
    owner_has: str = ""
    methods: str = ""
    needs: str = ""
    unset: object = ...
    line: str = "model"  # the label of its line in the report
    shown: Shown = "if it differs"
    hidden: tuple[str, ...] = ()  # names that no line shows, because another one implies them
    source: str = ""

    @property
    def bounds(self) -> Bounds | None:
        """The least and the largest value of a number; None: it is none."""
        return BOUNDS.get(self.within) if isinstance(self.within, str) else self.within

    @property
    def library_names(self) -> tuple[str, ...]:
        """The names of the settings that spell the field in what we write."""
        if not self.values:
            return (self.written or self.field,)
        return tuple(dict.fromkeys(name for row in self.values.values() for name in row))

    def file_of(self, name: str) -> File:
        """Return where one of its names is written."""
        return self.names[name].file if name in self.names else self.file
