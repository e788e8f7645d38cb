"""The command in Python, for notebooks: `plan("Qwen2.5-7B", "2xA100-40G", method="grpo", zero_stage=3)`."""

from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import fields

from planner.errors import InputError
from planner.gpus.cluster import Cluster
from planner.gpus.hf_jobs import HF_JOBS
from planner.jobs.job import Job
from planner.jobs.settings import settings_of
from planner.notebook.arguments import options_of
from planner.planning import Plan
from planner.report.spelling import errors_spelled

if TYPE_CHECKING:
    import pandas as pd
    from plotly.graph_objects import Figure

    from planner.report.documents.plans import LaunchReport

WIDTH = 100  # columns of the table in a notebook
STYLE = "line-height:1.15;overflow-x:auto;font-family:Menlo,'DejaVu Sans Mono',Consolas,'Courier New',monospace"


class Answer(Plan, frozen=True, kw_only=True):
    """A plan that a notebook shows as the command's table."""

    def __repr__(self) -> str:
        """Return the command's table."""
        from planner.report.table import plan_table

        return plan_table(self, WIDTH).plain

    def _repr_html_(self) -> str:
        """Return the table as HTML without colours of its own, so that it suits light and dark notebooks."""
        return table_html(repr(self))

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the best candidate by the libraries' names."""
        return settings_of(self.best.candidate)

    @property
    def launch(self) -> "LaunchReport | None":
        """Command, variables and files that start the best candidate; None: it does not fit."""
        from planner.report.json import plan_report

        return plan_report(self).best.launch

    def json(self) -> str:
        """Return the document of `plan --json` as text."""
        from planner.report.json import json_text, plan_report

        return json_text(plan_report(self))

    @errors_spelled("python")
    def export(self, folder: str | Path, overwrite: bool = False) -> tuple[Path, ...]:
        """Write the files that start the best candidate, as `plan export` does, and return their paths.

        Raises:
            PlanError: it does not fit, TRL has no argument for a setting, or a file says something else and `overwrite`
                is False.
        """
        from planner.files.write import write_files
        from planner.report.json import plan_report

        best = plan_report(self).best
        if best.launch is None:
            raise InputError(f"There is nothing to export. {best.why_no_launch}")
        return write_files(best.launch.files, Path(folder), overwrite)

    def to_frame(self) -> "pd.DataFrame":
        """Return one row for the best candidate, each alternative and each remedy: memory, speed, settings.

        Raises:
            PlanError: pandas is not installed.
        """
        from planner.report.frame import candidates

        return candidates(self)

    def considered(self) -> "pd.DataFrame":
        """Return one row for each structure that the search considers, with why it was not recommended (`reason`).

        Raises:
            PlanError: pandas is not installed.
        """
        from planner.report.frame import considered

        return considered(self)

    def plot_memory(self) -> "Figure":
        """Return a bar of memory for each phase of the step, with the card's end and the interval of the peak.

        Raises:
            PlanError: plotly is not installed.
        """
        from planner.notebook.figures import memory_figure

        return memory_figure(self.best)

    def plot_candidates(self) -> "Figure":
        """Return speed against memory of the candidates that the search estimated; takes as long as the plan did.

        Raises:
            PlanError: plotly is not installed.
        """
        from planner.notebook.figures import candidates_figure

        return candidates_figure(self)

    def plot_what_if(self) -> "Figure":
        """Return a heat map of what the best candidate needs at other lengths and micro-batches.

        Raises:
            PlanError: plotly is not installed.
        """
        from planner.notebook.figures import what_if_figure

        return what_if_figure(self)


@errors_spelled("python")
def plan(model: str | Job | None = None, gpus: str | Cluster | None = None, **asked: Any) -> Answer:
    """Plan a job as the command does.

    Args:
        model: as `--model`; or a `Job`, with its cluster and nothing else.
        gpus: as `--gpus`; or a `Cluster`.
        asked: the command's flags (`method`, `tuning`, `max_length`, `batch_size`, `effective_batch_size`, `risk`,
            `optimize`, `config`, ...) with underscores, and settings by the libraries' names, as with `--set`.

    Raises:
        PlanError: what the command refuses, in Python's words.
    """
    if isinstance(model, Job) and isinstance(gpus, Cluster) and not asked:
        from planner.ask import planned_job

        return _answer(planned_job(model, gpus))
    if isinstance(gpus, list | tuple) or (isinstance(gpus, str) and ("," in gpus or gpus == HF_JOBS)):
        raise InputError("plan takes one cluster. Compare several: sweep(model, ['1xL4', '2xA100-40G'], method='sft').")
    if not isinstance(model, str | None) or not isinstance(gpus, str | None):
        raise InputError(
            "plan takes two names and settings, as plan('Qwen2.5-7B', '2xA100-40G', method='grpo'), or a Job and a "
            "Cluster without settings."
        )
    from planner.ask import planned, silent
    from planner.requests.options import SearchOptions
    from planner.requests.read_options import read_options
    from planner.training_stack import complete_models

    options = options_of(SearchOptions, {"model": model, "gpus": gpus}, asked)
    return _answer(planned(read_options(options, complete_models(silent))))


def _answer(found: Plan) -> Answer:
    return Answer(**{field.name: getattr(found, field.name) for field in fields(Plan)})


def table_html(table: str) -> str:
    """Return a table of the command as HTML."""
    return f'<pre style="{STYLE}">{escape(table)}</pre>'
