"""The front page: a form, and the report of the job that was filled in, or of several clusters."""

import shlex
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args
from urllib.parse import parse_qs, urlencode

from msgspec import Struct
from msgspec.structs import fields, replace

from planner.errors import InputError, shortened
from planner.gpus.hf_jobs import CLUSTERS, HF_JOBS
from planner.gpus.prices import parse_prices
from planner.jobs.job import Goal
from planner.methods import METHODS
from planner.models.catalogue import model_rows
from planner.planning import Plan
from planner.report.listing import Compared
from planner.report.page.answer import Origin, plan_html
from planner.report.page.comparison import comparison_html
from planner.report.page.template import page, template
from planner.report.spelling import LABELS
from planner.requests.command_line import command_line
from planner.requests.machines import BY_COST, Pricing, pricing_of
from planner.requests.options import CandidateOptions, JobOptions, SearchOptions

FieldKind = Literal["text", "whole", "number", "choice"]

TUNINGS = ("auto", "full", "lora", "qlora")
GPU_EXAMPLES = ("1xRTX-4090", "1xL4", "2xA100-40G", "8xA100-80G", "8xH100", "2x8xH100")
MOST_FIELDS = 30  # fields of a query
MOST_CLUSTERS = 8  # of a comparison
MOST_DIGITS = 9


class Field(Struct, frozen=True, kw_only=True):
    """A field of the form: an option of a search by its name, and an example or what stands for nothing."""

    name: str
    kind: FieldKind = "text"
    hint: str = ""
    choices: tuple[str, ...] = ()  # the first is the default
    suggestions: str = ""  # the list of names that the browser suggests
    required: bool = False

    @property
    def label(self) -> str:
        return LABELS[self.name]


USUAL = "TRL's default"
FIELDS: tuple[Field, ...] = (
    Field(name="model", hint="Qwen2.5-7B", suggestions="models", required=True),
    Field(name="gpus", hint="2xA100-40G, or several: 1xL4,8xH100", suggestions="gpus", required=True),
    Field(name="method", kind="choice", choices=("sft", *(name for name in METHODS if name != "sft"))),
    Field(name="tuning", kind="choice", choices=TUNINGS),
    Field(name="max_length", kind="whole", hint=USUAL),
    Field(name="prompt_length", kind="whole", hint="512"),
    Field(name="max_completion_length", kind="whole", hint=USUAL),
    Field(name="effective_batch_size", kind="whole", hint=USUAL),
)
MORE_FIELDS: tuple[Field, ...] = (
    Field(name="lora_r", hint="16, or 16,32,64"),
    Field(name="batch_size", kind="whole", hint="searched"),
    Field(name="lengths", hint="p50=380,p95=1900,max=8192"),
    Field(name="completion_lengths", hint="p50=380,p95=1900,max=8192"),
    Field(name="free_memory", hint="all of it, or 30GiB"),
    Field(name="host_memory", hint="as usual, or 256GiB"),
    Field(name="network", hint="400Gb"),
    Field(name="risk", kind="number", hint="0.05"),
    Field(name="optimize", kind="choice", choices=(*get_args(Goal), BY_COST)),
)
PRICE_FIELDS = (
    Field(name="prices", hint="L4=0.8, H100=2.5"),
    Field(name="tokens", hint="300M"),
)
LOG = "log"  # the field of a log's text
LOG_FIELDS = tuple(replace(field, required=False) for field in FIELDS[:4])  # of the job that wrote it
SETTINGS = "settings"  # the field for all other settings, one name=value a line
NAMES = (*(field.name for field in (*FIELDS, *MORE_FIELDS, *PRICE_FIELDS)), SETTINGS)
DEFAULTS = {field.name: field.choices[0] for field in (*FIELDS, *MORE_FIELDS) if field.choices}

# Jobs that show what a page answers: a sentence, what it shows, and the fields.
EXAMPLES: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    (
        "Qwen2.5-7B with GRPO on two A100",
        "the largest and fastest configuration, and its files",
        {"model": "Qwen2.5-7B", "gpus": "2xA100-40G", "method": "grpo"},
    ),
    (
        "Llama-3.1-70B on two RTX 4090",
        "why it does not fit, and what to change",
        {"model": "Llama-3.1-70B", "gpus": "2xRTX-4090", "method": "sft", "max_length": "8192"},
    ),
    (
        "Llama-3.1-8B: one L4, two A100 or eight H100?",
        "several clusters side by side",
        {"model": "Llama-3.1-8B", "gpus": "1xL4,2xA100-40G,8xH100", "method": "sft"},
    ),
)


class Form(Struct, frozen=True, kw_only=True):
    """The fields of the form as text, by name; a field that was left empty is absent."""

    values: Mapping[str, str]

    @property
    def is_empty(self) -> bool:
        """Return whether neither a model nor GPUs are filled in."""
        return not self.values.get("model") and not self.values.get("gpus")

    @property
    def clusters(self) -> tuple[str, ...]:
        """Return the clusters that are named, in their order."""
        return tuple(name.strip() for name in self.values.get("gpus", "").split(",") if name.strip())

    @property
    def address(self) -> str:
        """Return the address of the page with these fields."""
        return f"/?{urlencode({name: text for name, text in self.values.items() if text != DEFAULTS.get(name)})}"

    @property
    def compares(self) -> bool:
        """Return whether the fields ask for a comparison: several clusters, or what one costs."""
        priced = {field.name for field in PRICE_FIELDS} & self.values.keys()
        return len(self.clusters) > 1 or HF_JOBS in self.clusters or bool(priced) or self._goal == BY_COST

    @property
    def _goal(self) -> str:
        return self.values.get("optimize", DEFAULTS["optimize"])

    def pricing(self) -> Pricing:
        """Return the prices and the tokens that the fields name.

        Raises:
            InputError: a price or the tokens are no number above 0, or a name is no GPU's.
        """
        return pricing_of(parse_prices(self.values.get("prices", "")), self.values.get("tokens"))

    @property
    def command(self) -> str:
        """Return the command that gives the same answer; prices are a file there."""
        pricing = [f"--tokens {shlex.quote(self.values['tokens'])}"] if "tokens" in self.values else []
        pricing += ["--prices prices.toml"] if "prices" in self.values else []
        return " ".join([command_line(self.options()), *pricing])

    def options(self) -> SearchOptions:
        """Return the options that the fields stand for.

        Raises:
            InputError: a field for a number has something else, or a setting has no value.
        """
        given: dict[str, Any] = {
            field.name: _value(field, self.values[field.name])
            for field in (*FIELDS, *MORE_FIELDS)
            if field.name in self.values
        }
        settings = _settings(self.values.get(SETTINGS, ""))
        return SearchOptions(**({"method": DEFAULTS["method"]} | given), set=settings or None)

    def candidate_options(self) -> CandidateOptions:
        """Return the options of the job that wrote a log; its tuning is what its settings say."""
        options = self.options()
        return CandidateOptions(**{field.name: getattr(options, field.name) for field in fields(JobOptions)})

    def on(self, cluster: str) -> "Form":
        """Return the form with one cluster instead of several."""
        return replace(self, values={**self.values, "gpus": CLUSTERS.get(cluster, cluster)})


assert {field.name for field in (*FIELDS, *MORE_FIELDS)} <= {entry.name for entry in fields(SearchOptions)}


def read_form(query: bytes) -> Form:
    """Return the fields of a query; other names are skipped.

    Raises:
        InputError: there are too many fields.
    """
    try:
        given = parse_qs(query.decode("ascii", "replace"), errors="replace", max_num_fields=MOST_FIELDS)
    except ValueError as error:
        raise InputError(f"The form has more than {MOST_FIELDS} fields.") from error
    texts = {name: given[name][-1].strip() for name in NAMES if name in given}
    return Form(values={name: text for name, text in texts.items() if text})


def form_page(form: Form, plan: Plan | None, error: str) -> str:
    """Return the form with its fields filled in; below it the report of the plan, or above it the error."""
    if plan is None:
        log = template("planner.serve", "log.html").render(form={}, fields=LOG_FIELDS, log="", diagnosis="")
        return page("plan: what fits my GPUs?", [_form(form, True, error), log])
    origin = Origin(command=command_line(form.options()), address=form.address)
    return plan_html(plan, origin, [_form(form, False, "")])


def read_log(body: bytes) -> tuple[Form, str]:
    """Return the fields of a log's form, and the log; raise InputError if there are too many fields."""
    texts = parse_qs(body.decode("ascii", "replace"), errors="replace", max_num_fields=MOST_FIELDS)
    return read_form(body), "\n".join(texts.get(LOG, [""])[-1].splitlines())


def log_page(form: Form, log: str, diagnosis: str, error: str) -> str:
    """Return what a log tells as text, and the form with the log; above them the error."""
    told = template("planner.serve", "log.html").render(
        form=form.values, fields=LOG_FIELDS, log=log, diagnosis=diagnosis
    )
    return page("plan: what happened?", [_form(replace(form, values={}), False, error), told])


def comparison_page(form: Form, rows: Sequence[Compared]) -> str:
    """Return the form, and below it the job on several clusters."""
    return comparison_html(rows, form.command, lambda gpus: form.on(gpus).address, [_form(form, False, "")])


def _form(form: Form, is_open: bool, error: str) -> str:
    text: str = template("planner.serve", "form.html").render(
        form=form.values,
        is_open=is_open,
        error=error,
        examples=[(title, about, Form(values=values).address) for title, about, values in EXAMPLES] if is_open else [],
        fields=FIELDS,
        more_fields=(*MORE_FIELDS, *PRICE_FIELDS),
        more_open=any(field.name in form.values for field in (*MORE_FIELDS, *PRICE_FIELDS) if not field.choices)
        or SETTINGS in form.values,
        models=_model_ids(),
        gpus=GPU_EXAMPLES,
    )
    return text


@lru_cache(maxsize=1)
def _model_ids() -> tuple[str, ...]:
    return tuple(row.id for row in model_rows())


def _settings(text: str) -> dict[str, str]:
    """Return the settings of the lines, unchecked.

    Raises:
        InputError: a line has no value, or a name is given twice.
    """
    given: dict[str, str] = {}
    for line in filter(str.strip, text.splitlines()):
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals:
            raise InputError(f"The setting {shortened(line)} has no value. Write it as name=value, such as lora_r=16.")
        if given.setdefault(name, value) != value:
            raise InputError(f"{shortened(name)} is set twice: {shortened(given[name])} and {shortened(value)}.")
    return given


def _value(field: Field, text: str) -> str | int | float:
    if field.kind == "whole":
        if not text.isdecimal() or len(text) > MOST_DIGITS or int(text) == 0:
            raise InputError(f"{field.name} is no number from 1 on: {shortened(text)}.")
        return int(text)
    if field.kind == "number":
        try:
            return float(text)
        except ValueError as error:
            raise InputError(f"{field.name} is no number: {shortened(text)}.") from error
    return text
