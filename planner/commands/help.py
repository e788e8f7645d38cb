"""The help of a command: its options in panels, then examples that run."""

import shutil
import sys
from collections.abc import Sequence
from io import StringIO
from typing import TYPE_CHECKING, Any

import typer.core

from planner.commands.options import HEADINGS, OPTIONS, OUTPUT

if TYPE_CHECKING:
    from rich.console import Console

NARROWEST, WIDEST = 60, 100  # columns
NAME_WIDTH = 31  # of an option with its value: --max-completion-length TOKENS
EXIT_CODES = "Exit codes: 0 planned, 2 wrong input, 3 nothing fits, 4 the probe contradicts the plan, 1 anything else."
# Commands at the end of the help, by subcommand; "": plan itself. Later ones read what earlier ones have written.
EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "plan --model Qwen2.5-7B --gpus 2xA100-40G --method grpo",
        "plan --model Llama-3.1-8B --gpus 1xL4,8xH100 --method sft --tokens 300M",
        "plan --model Qwen2.5-7B --gpus 2xA100-40G --method grpo --out run",
    ),
    "export": ("plan export run run/files", "plan export run run/torchrun --launcher torchrun"),
    "estimate": (
        "plan estimate --model Qwen2.5-0.5B --gpus 1xL4 --method sft --tuning lora",
        "plan estimate --config run/files/train.yaml --gpus 2xA100-40G --method grpo",
    ),
    "diff": (
        "plan diff 1.4 1.16 --model Qwen2.5-7B --gpus 1xH100 --method sft --tuning lora",
        "plan diff 1.12 1.16 --model Qwen2.5-0.5B --gpus 1xL4 --method dpo --json",
    ),
    "dry-run": (
        "plan dry-run --model Qwen2.5-0.5B --gpus 1xL4 --method sft --tuning lora",
        "plan dry-run --model Qwen2.5-0.5B --gpus 1xL4 --method dpo --json",
    ),
    "probe": (
        "plan probe --model Qwen2.5-0.5B --gpus local --method sft --tuning lora",
        "plan probe run --device emulated",
    ),
    "diagnose": (
        "plan diagnose train.log",
        "plan diagnose train.log --model Qwen2.5-7B --gpus 2xA100-40G --method grpo",
    ),
    "lengths": (
        "plan lengths train.jsonl --model Qwen2.5-7B-Instruct",
        "plan lengths chats.csv --model Qwen2.5-7B-Instruct --out counts.txt",
    ),
    "validate": ("plan validate cases.jsonl", "plan validate cases.jsonl --gpus 1xA100-80G --csv errors.csv"),
    "serve": ("plan serve", "plan serve --host 0.0.0.0 --token SECRET"),
    "mcp": ("plan mcp",),
    "models": ("plan models llama", "plan models --json"),
    "gpus": ("plan gpus rtx", "plan gpus --json"),
    "schema": ("plan schema",),
    "measurements": ("plan measurements", "plan measurements --gpu L4 --export"),
}


class Command(typer.core.TyperCommand):
    """A subcommand, whose help is written here."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_text(self, ctx))


class PlanGroup(typer.core.TyperGroup):
    """The command `plan` itself, whose help is written here."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(help_text(self, ctx))


def help_text(command: Any, ctx: Any) -> str:
    """Return the help of a command: what it does, its options, its subcommands and examples."""
    from rich.console import Console

    width = min(max(shutil.get_terminal_size().columns, NARROWEST), WIDEST)
    text = StringIO()
    console = Console(
        file=text, width=width, force_terminal=sys.stdout.isatty(), highlight=False, markup=False, emoji=False
    )
    console.print(f"{' '.join(command.get_usage(ctx).split())}\n")
    for paragraph in (command.help or "").split("\n\n"):
        code = paragraph.startswith("    ")
        console.print(f"{paragraph if code else ' '.join(paragraph.split())}\n", soft_wrap=code)
    params = [param for param in command.get_params(ctx) if not getattr(param, "hidden", False)]
    for heading in HEADINGS:
        _panel(console, heading, [_row(param, ctx) for param in params if _heading(param) == heading])
    commands = getattr(command, "commands", {})
    _panel(console, "Commands", [(name, _first_sentence(each.help or "")) for name, each in commands.items()])
    name = ctx.info_name if ctx.parent is not None else ""
    console.print("Examples:", style="bold")
    for example in EXAMPLES[name]:
        console.print(f"  {example}", soft_wrap=True)
    console.print(f"\n{EXIT_CODES}")
    return text.getvalue()


def _heading(param: Any) -> str:
    """Return the heading that a parameter stands under; --help and Typer's completion are output."""
    own = param.name in ("help", "install_completion", "show_completion")
    return getattr(param, "rich_help_panel", None) or (OUTPUT if own else OPTIONS)


def _row(param: Any, ctx: Any) -> tuple[str, str]:
    """Return a parameter with the word for its value, and its help with its default."""
    if param.param_type_name == "argument":
        return param.metavar or param.name.upper(), param.help or ""
    value = "" if param.is_flag else f" {param.metavar or 'VALUE'}"
    names = ", ".join([*sorted(param.opts, key=len), *param.secondary_opts])
    default = param.default
    shown = default is not None and not param.is_flag and not callable(default) and default != ()
    return f"{names}{value}", f"{param.help or ''}{f' Default: {default}.' if shown else ''}"


def _panel(console: "Console", heading: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print names beside their help in a box; nothing without rows."""
    from rich.panel import Panel
    from rich.table import Table

    if not rows:
        return
    table = Table.grid(padding=(0, 2), expand=True)
    table.add_column(style="bold", width=min(max(len(name) for name, _ in rows), NAME_WIDTH), overflow="fold")
    table.add_column(ratio=1)
    for name, words in rows:
        table.add_row(name, words)
    console.print(Panel(table, title=heading, title_align="left", border_style="dim"))


def _first_sentence(text: str) -> str:
    """Return the first sentence of a command's help."""
    words = " ".join(text.split("\n\n")[0].split())
    return words.partition(". ")[0].removesuffix(".") + "."
