"""Write docs/plan.svg, the picture of the README: an answer on a small terminal. `python -m scripts.picture`."""

from io import StringIO
from pathlib import Path

from rich.console import Console

from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.models.catalogue import load_model
from planner.planning import plan
from planner.report.screen import Screen, plan_screen

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "plan.svg"
COMMAND = "plan --model Qwen2.5-7B --gpus 2xA100-40G --method grpo"
SCREEN = Screen(width=80, lines=30)  # tall enough for the bar


def picture() -> str:
    """Return the picture as SVG."""
    answer = plan(Job(model=load_model("Qwen2.5-7B"), method="grpo"), parse_cluster("2xA100-40G"))
    console = Console(
        record=True, width=SCREEN.width, file=StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    console.print(plan_screen(answer, SCREEN))
    return console.export_svg(title=COMMAND, unique_id="plan")


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
