"""Write docs/plan.svg, the picture of the README: the head and the bars of an answer. `python -m scripts.picture`."""

from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.text import Text

from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.models.catalogue import load_model
from planner.planning import plan
from planner.report.table import plan_table

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "plan.svg"
COMMAND = "plan --model Qwen2.5-7B --gpus 2xA100-40G --method grpo"
WIDTH = 100


def picture() -> str:
    """Return the picture as SVG: the lines up to the settings, and those of the bars."""
    answer = plan(Job(model=load_model("Qwen2.5-7B"), method="grpo"), parse_cluster("2xA100-40G"))
    lines = plan_table(answer, WIDTH).split("\n")
    starts = {line.plain.split(" ")[0]: number for number, line in reversed(list(enumerate(lines))) if line.plain}
    shown = [*lines[: starts["batch"]], *lines[starts["GiB"] : starts["host"]]]
    console = Console(record=True, width=WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text("\n").join(shown))
    return console.export_svg(title=COMMAND, unique_id="plan")


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
