"""The front page: a form, and the report of the job that was filled in."""

from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import parse_qs

from planner.errors import InputError, shortened
from planner.jobs.settings import parse_assignments
from planner.methods import METHODS
from planner.models.catalogue import model_rows
from planner.planning import Plan
from planner.report.html import form_only_html, plan_html, template
from planner.requests.options import SearchOptions

TUNINGS = ("auto", "full", "lora", "qlora")
GPU_EXAMPLES = ("1xRTX-4090", "1xL4", "2xA100-40G", "8xA100-80G", "8xH100", "2x8xH100")
MOST_FIELDS = 20  # fields of a query; the form has 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """The fields of the form as text; "" is a field that was left empty."""

    model: str = ""
    gpus: str = ""
    method: str = "sft"
    tuning: str = "auto"
    max_length: str = ""
    effective_batch_size: str = ""
    settings: str = ""  # one name=value a line

    def options(self) -> SearchOptions | None:
        """Return the options that the fields stand for; None: nothing was filled in.

        Raises:
            InputError: a field for a number has something else.
        """
        if not self.model and not self.gpus:
            return None
        return SearchOptions(
            model=self.model or None,
            gpus=self.gpus or None,
            method=self.method or None,
            tuning=self.tuning or "auto",
            max_length=_number("max_length", self.max_length),
            effective_batch_size=_number("effective_batch_size", self.effective_batch_size),
            set=parse_assignments(line for line in self.settings.splitlines() if line.strip()),
        )


def read_form(query: bytes) -> Form:
    """Return the fields of a query; other names are skipped.

    Raises:
        InputError: there are too many fields.
    """
    try:
        given = parse_qs(query.decode("ascii", "replace"), errors="replace", max_num_fields=MOST_FIELDS)
    except ValueError as error:
        raise InputError(f"The form has more than {MOST_FIELDS} fields.") from error
    return Form(**{name: values[-1].strip() for name, values in given.items() if name in Form.__slots__})


def form_page(form: Form, plan: Plan | None, error: str) -> str:
    """Return the form with its fields filled in; below it the report of the plan, or above it the error."""
    text = template("planner.serve", "form.html").render(
        form=form,
        is_open=plan is None,
        error=error,
        models=_model_ids(),
        methods=tuple(METHODS),
        tunings=TUNINGS,
        gpus=GPU_EXAMPLES,
    )
    return form_only_html(text) if plan is None else plan_html(plan, text)


@lru_cache(maxsize=1)
def _model_ids() -> tuple[str, ...]:
    return tuple(row.id for row in model_rows())


def _number(name: str, text: str) -> int | None:
    if not text:
        return None
    if not text.isdecimal() or len(text) > 9 or int(text) == 0:
        raise InputError(f"{name} is no number from 1 on: {shortened(text)}.")
    return int(text)
