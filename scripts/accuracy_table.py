"""Print the README's accuracy table from the files of results/: `python scripts/accuracy_table.py`.

`make golden` puts the table into the README.
"""

import json
import statistics
from collections.abc import Iterable
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "results"

# Groups of published figures: (name, quantities that were read, quantized). A quantity is PyTorch's allocated bytes,
# its reserved bytes, or the card's used bytes as nvidia-smi shows them.
PUBLISHED = (
    ("allocated by PyTorch, unquantized", ("allocated", "after step"), False),
    ("reserved or shown by nvidia-smi, unquantized", ("reserved", "process"), False),
    ("any of them, 4-bit bases of older bitsandbytes and GPTQ", ("allocated", "reserved", "process"), True),
)
QUANTIZED = ("QLoRA", "Q-LoRA", "fsdp_qlora", "TRL notebook")  # groups whose bases are quantized


def rows(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (RESULTS / name).read_text(encoding="utf-8").splitlines()]


def accuracy_table() -> str:
    """A Markdown table of signed errors: one line for each source that the estimate is compared with."""
    lines = [
        "| computed | against | figures | median error | mean absolute | worst | under by more than 3 % |",
        "|---|---|---|---|---|---|---|",
    ]
    simulated = [
        ratio(row, "estimated_bytes", "simulated_bytes")
        for row in rows("estimated_vs_simulated.jsonl")
        if "error" not in row
    ]
    lines.append(line("training peak, formulas", "[the dry run](results/estimated_vs_simulated.md)", simulated))
    published = [row for row in rows("published.jsonl") if row.get("measured_bytes")]
    for words, quantities, quantized in PUBLISHED:
        chosen = [
            ratio(row, "predicted_bytes", "measured_bytes")
            for row in published
            if row["quantity"] in quantities and any(name in str(row["group"]) for name in QUANTIZED) == quantized
        ]
        lines.append(line("training peak, formulas", f"[published runs](results/published.md): {words}", chosen))
    return "\n".join(lines)


def ratio(row: dict[str, object], computed: str, true: str) -> float:
    return float(str(row[computed])) / float(str(row[true])) - 1


def line(computed: str, against: str, errors: Iterable[float]) -> str:
    found = sorted(errors)
    mean = statistics.mean(map(abs, found))
    under = sum(error < -0.03 for error in found) / len(found)
    middle, worst = statistics.median(found), max(found, key=abs)
    return f"| {computed} | {against} | {len(found)} | {middle:+.1%} | {mean:.1%} | {worst:+.1%} | {under:.0%} |"


if __name__ == "__main__":
    print(accuracy_table())
