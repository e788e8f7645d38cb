"""Templates of the page, its style and its one script, which copies. Needs the [report] extra."""

from collections.abc import Sequence
from functools import lru_cache, partial
from importlib.resources import files
from typing import TYPE_CHECKING

from planner.errors import PlanError
from planner.report.bars import COUNTS
from planner.report.spelling import spelled
from planner.report.words import readable, tokens_per_second
from planner.units import format_count, format_gib

if TYPE_CHECKING:
    from jinja2 import Template


def page(title: str, parts: Sequence[str]) -> str:
    """Return a whole page that loads nothing: parts in HTML, in their order.

    Raises:
        PlanError: Jinja2 is not installed.
    """
    style = files("planner.report.page").joinpath("page.css").read_text(encoding="utf-8").strip()
    text: str = template("planner.report.page", "page.html").render(title=title, parts=parts, style=style)
    return text


@lru_cache(maxsize=1)
def page_script() -> str:
    """Return the script of the page, which a server allows by its digest."""
    return files("planner.report.page").joinpath("page.js").read_text(encoding="utf-8").strip()


@lru_cache(maxsize=8)
def template(package: str, name: str) -> "Template":
    """Return a template of a package.

    Raises:
        PlanError: Jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise PlanError(
            "--html needs Jinja2, which is in the report extra: pip install 'finetune-plan[report]'."
        ) from error
    environment = Environment(
        loader=PackageLoader(package, ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals |= {"counts": COUNTS, "script": page_script()}
    environment.filters |= {
        "gib": lambda size: format_gib(size, 1),
        "count": format_count,
        "words": readable,
        "per_second": tokens_per_second,
        "said": partial(spelled, door="page"),
    }
    return environment.get_template(name)
