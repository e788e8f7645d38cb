"""Templates of the page, its style and its one script, which copies. Needs the [report] extra."""

import re
from collections.abc import Sequence
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING

from planner.errors import PlanError
from planner.report.bars import COUNTS
from planner.report.words import readable, tokens_per_second
from planner.units import format_count, format_gib

if TYPE_CHECKING:
    from jinja2 import Template


# The label of each option in the form, which a page names where a command names its flag.
LABELS = {
    "model": "Model",
    "gpus": "GPUs",
    "method": "Method",
    "tuning": "Tuning",
    "max_length": "Tokens of a row",
    "prompt_length": "Tokens of a prompt",
    "max_completion_length": "Tokens of a completion",
    "effective_batch_size": "Effective batch size",
    "lora_r": "LoRA rank",
    "batch_size": "Samples of a micro-batch",
    "lengths": "Lengths of your rows",
    "completion_lengths": "Lengths of completions",
    "free_memory": "Usable memory of a GPU",
    "host_memory": "Host memory of a node",
    "network": "Network of a node",
    "risk": "Accepted risk",
    "optimize": "Prefer",
    "prices": "Price of a GPU and hour",
    "tokens": "Tokens to train on",
}
FACTS = ("images_per_row", "image_size", "padded")  # options that are settings too
FLAG = re.compile(r"--set (?=\w+=)|(?<![\w-])--([a-z][a-z-]*)")


def without_flags(text: str) -> str:
    """Return a sentence with the form's labels instead of the flags of a job; a setting stands as in its field.

    Example: `give yours with --lengths` is `give yours with “Lengths of your rows”`.
    """

    def label(flag: re.Match[str]) -> str:
        name = (flag[1] or "").replace("-", "_")
        return f"“{LABELS[name]}”" if name in LABELS else flag[0] if name and name not in FACTS else name

    return FLAG.sub(label, text)


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
        "said": without_flags,
    }
    return environment.get_template(name)
