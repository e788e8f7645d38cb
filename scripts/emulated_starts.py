"""Start what `plan` recommends, drawn at random: results/emulated_starts.jsonl, and results/emulated_starts.md.

    DIR/bin/python -m scripts.emulated_starts run SEED [COUNT]   in an environment of scripts/emulated_environment.sh
    DIR/bin/python -m scripts.emulated_starts again NAME ...     draws that have a row, which stays
    DIR/bin/python -m scripts.emulated_starts one NAME FOLDER    one start, whose files and logs stay in FOLDER
    python -m scripts.emulated_starts table                      the page, from the rows that there are

NAME: a fixed start of scripts/drawn_starts.py, or SEED-NUMBER, which is started as its row says if it has one. A draw
that has a row is not started again by `run`, so that a run can be broken off.
"""

import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any, Literal, get_args

from planner.errors import PlanError
from planner.estimation import engine_of, teacher_engine_of
from planner.launch.shell import SLURM_FILE
from planner.memory.engine.budget import EngineMemory
from planner.schemes import SCHEMES
from planner.units import GIB, MIB
from probes.runner.devices import REAL_PROCESSES
from scripts.drawn_starts import CLUSTERS, SERVED_STARTS, STARTS, USERS_YAML, Drawn, drawn_start
from scripts.emulated_engine import cache_bytes
from scripts.mutate import commit

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS, PAGE = RESULTS / "emulated_starts.jsonl", RESULTS / "emulated_starts.md"
CLOSE = 0.03  # of allocated bytes: a start that is further off does not pass
# Of tiny models, a workspace of cuBLAS is more than that: the estimate counts those of two streams
# (planner/memory/runtime.py), of which a run may have one.
WORKSPACE_BYTES = 10 * MIB
LARGEST_PARAMETERS = 3e9  # of a cut model, whose weights the host may hold
LARGEST_HOST_BYTES = 16 * GIB  # of the processes that run here, with optimizers on the CPU: their bytes are real
# `not planned`: refused, or nothing fits. `cut refused`: only the cut model is. `too large`: for this machine.
Outcome = Literal["passed", "off", "failed", "not resumed", "not planned", "cut refused", "too large"]
STARTED: tuple[Outcome, ...] = ("passed", "off", "failed", "not resumed")
MISSED: tuple[Outcome, ...] = ("off", "failed", "not resumed", "cut refused")
# Causes that were found, by the row's draw and commit.
NO_RESUME = "train.py ignored --resume_from_checkpoint; mended by f7b47ba."
HOST = "Optimizers on the CPU need more host memory than this machine has: the instrument, mended by b13e8ce."
EXPERTS = "Batched experts copy the weights of each token's experts in generation; mended by 29d7480."
IMAGES = "The instrument: gathered objects with images; mended by ed00108."
RANK = "The instrument: of more than two processes rank 0 runs alone, and the estimate is of the heaviest rank."
CAUSES: dict[str, str] = {
    "1-0 at 1034d84": NO_RESUME,
    "1-2 at 1034d84": NO_RESUME,
    "1-3 at 1034d84": "train.py read no evaluation split; mended by f7b47ba.",
    "1-5 at 1034d84": "The reference's pass of the same model (LoRA) under ZeRO-3 gathers ahead by the policy's trace; "
    "mended by 3d7e5160.",
    "1-13 at 1d06125": "Rows of 96 tokens, which Mamba 2 pads to chunks; mended by 7e373a6: +0.7 % since.",
    "1-14 at 1d06125": "Under DDP the layers of Falcon were taken to be sent in 4 bits; mended by ad47976.",
    "1-7 at 1034d84": "Layers of a config that Transformers saved are measured of a cut that keeps its "
    "`per_layer_config`; mended by 39bb173.",
    "1-0 at 3c582a8": "Transformers' checkpoints of 4-bit weights under FSDP2, as the plan says.",
    "1-7 at 39bb173": "The cut model's folder lacked the files of a processor; mended by ba327e1.",
    "2-1 at d4de641": "Not found yet: FSDP2 with 4-bit experts.",
    "2-4 at 5f00c82": "Not found yet: ZeRO-3 with images.",
    "2-25 at e127db0": IMAGES,
    "6-1 at 0852481": "Not found yet: ZeRO-3 with packed rows of a mixture of experts.",
    "2-16 at d2159cc": "Not found yet: 72 MiB under FSDP2.",
    "2-16 at fcf7dfe": "Not found yet: 66 MiB of KTO under FSDP2.",
    "4-6 at d2159cc": "The start's rows in random order: batches without padding, against the files.",
    "4-11 at f8c1f65": "The start's prompts were empty: Transformers took the published class for our tokenizer.",
    "7-0 at db01b44": HOST,
    "7-9 at db01b44": IMAGES,
    "7-17 at db01b44": EXPERTS,
    "7-18 at db01b44": IMAGES,
    "7-9 at 06b2c6f": "Not found yet: images under ZeRO-1, GMPO.",
    "7-29 at db01b44": HOST,
    "7-36 at db01b44": EXPERTS,
    "7-49 at db01b44": HOST,
    "7-51 at db01b44": EXPERTS,
    "7-54 at b13e8ce": EXPERTS,
    "7-62 at ed00108": EXPERTS,
    "7-5 at db01b44": f"{RANK} Gradients of tensors with a part in a partition: 525 MiB at most, of rank 0's 313.",
    "7-22 at db01b44": f"{RANK} Rank 0 has the embedding's gradient, the last one, so that it lacks the buffer of "
    "gradients in the layers' backward pass. A dry run of that job on two GPUs, whose processes both run: -0.03 %.",
    "7-24 at db01b44": "Bloom's model holds the probabilities of a block beside the next one; mended by 40f3104.",
    "7-53 at b13e8ce": "A loop's variable in train.py held the whole head beside its shards; mended by 5232c17.",
    "7-58 at ed00108": "Gemma 4's layers that share keys get the last token of a prompt alone; mended since.",
    "7-90 at 29d7480": "Liger replaces cross entropy for Granite alone, whose gradient overwrites the logits of the "
    "chosen rows; mended by d105887.",
    "7-77 at 29d7480": "Mistral 3's processor makes a tensor of prompts that TRL does not pad; train.yaml says not to "
    "since.",
    "7-85 at 29d7480": "Packed rows of LFM2 need the package causal-conv1d (transformers 5.23, "
    "integrations/hub_kernels.py), which is not installed here; requirements.txt names it since.",
    "7-94 at 29d7480": "GKD's config has a coefficient of the router loss, which train.py did not set; mended by "
    "5af181f.",
    "7-98 at 29d7480": "LoRA on an image tower that rows of text never use has no optimizer state, "
    "at which FSDP2's resume stops; the answer says so since 4727661.",
    "8-0 at 53b3cc5": "The instrument wrote experts as the model has them, and ZeRO-3 always turns them; mended by "
    "91648ab. It ran then, 12.9 % under, before 58780dd; today's plan is too large for this machine.",
    "8-3 at 53b3cc5": "PEFT loads adapters of a checkpoint in float32: the answer says so, and the resumed process is "
    "held to that estimate, since b079f68.",
    "8-36 at 53b3cc5": "As 8-3.",
    "8-62 at 53b3cc5": "As 8-3.",
    "8-7 at 53b3cc5": "`generate` leaves an untied head gathered under FSDP2; mended by 1950bbe.",
    "8-12 at 53b3cc5": "What k-bit preparation left in float32 is whole beside its shards; mended by d54d80d.",
    "8-22 at 53b3cc5": "Of two layers no third is gathered while one is reduced, as in the whole model.",
    "8-25 at 53b3cc5": "As 8-63: an image model without images, drawn with padding.",
    "8-39 at 53b3cc5": "The instrument estimated the files for two nodes, of which they use one; mended by 74bbd44.",
    "8-40 at 53b3cc5": "The instrument: one group of completions of one length holds no padding, which was pinned; "
    "such is no longer drawn since 4b49fee.",
    "8-48 at 53b3cc5": "Of the cut alone: a head of 16 bits, 250 MiB, is counted that few layers do not gather. A dry "
    "run of the whole phi-2 is within 0.3 % in every phase (at bf86b2c).",
    "8-51 at 53b3cc5": "Not found yet: CPO in full of a mixture of experts under ZeRO-3, 1.2 GiB too much.",
    "8-54 at 53b3cc5": "Liger's kernel for a fused gate and up keeps the projection beside copies of its halves; "
    "mended by c711660.",
    "8-63 at 53b3cc5": "The instrument, as 8-40: one group of completions of one length holds no padding, so that "
    "attention has no mask and repeats no keys and values. -0.2 % with padded=false.",
    "8-67 at 53b3cc5": "As 8-39.",
    "8-76 at 53b3cc5": "The instrument: it ended by its time, beside other work.",
    "8-85 at 53b3cc5": "As 8-63, with padding where it is the heavier kind.",
    "8-88 at 53b3cc5": "In part as 8-85; the rest, 3.3 %, not found yet: GMPO with LoRA under ZeRO-3.",
    "9-0 at 5a0a012": "Under FSDP2 no layer is gathered while the trainer computes the loss from the logits, and one "
    "was counted; mended by 61ff52d9.",
    "9-14 at 5a0a012": "FSDP2 gathers the embedding before a rollout without a KV cache, which was not counted; mended "
    "by 672a6072.",
    "9-18 at 5a0a012": "As 9-0.",
    "9-20 at 5a0a012": "The prompt's pass is estimated too high. In the whole model it is not the peak (0.0 % in a dry "
    "run). Layers are measured in bfloat16 without a cache, where softmax copies the scores and a reshape the keys and "
    "values.",
    "9-34 at 5a0a012": "GPT-J's 2,048 positions were not read, so that 4,097 tokens were planned; mended by 91190370.",
    "9-42 at 5a0a012": f"{RANK} As 7-22, not proven with two processes.",
    "9-57 at 5a0a012": "TRL's forward pass of CPO runs under autocast in float16, so that FSDP2 casts the logits to "
    "bfloat16 beside the head's buffer: not counted.",
    "9-65 at 5a0a012": "In part the norm of the experts' gradient in float64, counted since 2fffc6ff. The rest is "
    "not found yet: a mixture of experts under ZeRO-3 with an offloaded optimizer.",
    "9-65 at a594a18": "Not found yet: a mixture of experts under ZeRO-3 with an offloaded optimizer.",
    "0-36 at a07ce6b": "bitsandbytes' search for outliers of 8-bit products was not counted: +0.0 % since.",
    "0-39 at a07ce6b": "The gradient scaler stops at the step by which PyTorch makes the optimizer's states; the "
    "answer says so since.",
    "0-41 at a07ce6b": "DeepSpeed's loader of rows that GPUs share cannot skip batches; the answer says so since, and "
    "the README has ignore_data_skip.",
    "12-6 at 3afb41e": "The machine: a process that was killed before had left the lock of torch's C++ extensions, for "
    "which it waited.",
    "9-80 at 5a0a012": "Not found yet: eager attention of GPT-J under ZeRO-3, 188 MiB too much.",
}

ENGINES = {"engine": engine_of, "teacher": teacher_engine_of}  # of the server that samples, and of a teacher's


def row(draws: Sequence[Drawn], work: Path) -> dict[str, Any]:
    """Plan in a folder the first of one draw's clusters that has a plan, start its files and return its row."""
    from scripts.user_start import completed, resume_arguments, started, trial_arguments

    drawn, folder, refused = _first_planned(draws, work)
    found: dict[str, Any] = {"seed": drawn.seed, "number": drawn.number, "options": list(drawn.options)}
    found |= {"launcher": drawn.launcher, "own_yaml": bool(drawn.config), "resumes": drawn.resumes}
    found |= {"refused": refused, "commit": commit()}
    if folder is None:
        return found | _ended("not planned")
    try:
        files = completed(folder, work)
    except PlanError as error:
        return found | _ended("cut refused", str(error))
    candidate = files.candidate
    found["model_type"], found["files"] = candidate.model.model_type, sorted(path.name for path in folder.iterdir())
    found |= {name: getattr(candidate, name) for name in ("sharding", "tuning", "quantization", "num_processes")}
    if candidate.model.params > LARGEST_PARAMETERS or files.host_bytes > LARGEST_HOST_BYTES:
        return found | _ended("too large")
    first = started(files, trial_arguments(files), work, "train")
    found |= {"seconds": first.seconds, "estimated": files.allocated_bytes, "allocated": first.most("allocated")}
    found["evaluated"] = first.most("evaluations") > 0
    found |= servers_of(files, first)
    if first.exit_code or first.most("steps") < files.steps:
        return found | _ended("failed", first.message or "it ended before the last step")
    if files.saves and drawn.resumes and candidate.method_row.resumes and candidate.loads_checkpoints:
        again = started(files, resume_arguments(files), work, "resume")
        found |= {"resumed_estimated": files.resumed_bytes, "resumed_allocated": again.most("allocated")}
        if again.exit_code or again.most("began_at") != files.steps:
            return found | _ended("not resumed", again.message or "it began at step 0")
    return found | _ended("passed" if is_close(found) else "off")


def servers_of(files: Any, ended: Any) -> dict[str, dict[str, int]]:
    """Return what the engines of the files' servers recorded, beside their estimates."""
    found: dict[str, dict[str, int]] = {}
    for name, of in ENGINES.items():
        if engine := of(files.candidate, files.cluster.gpu):
            said = estimated_engine(engine)
            found |= {name: {part: ended.most(f"{name}_{part}") for part in said}, f"{name}_estimated": said}
    return found


def estimated_engine(engine: EngineMemory) -> dict[str, int]:
    """Return the estimate of what a server's processes record: an emulated card has nothing outside PyTorch."""
    return {"weights": engine.weights_bytes, "kv_cache_and_graphs": cache_bytes(engine)}


def _first_planned(draws: Sequence[Drawn], work: Path) -> tuple[Drawn, Path | None, int]:
    """Return the first draw with a plan, the folder of its files, and how many draws before had none."""
    from scripts.user_start import exported

    for refused, drawn in enumerate(draws):
        place = work / f"plan-{refused}"
        place.mkdir()
        with redirect_stdout(StringIO()):
            folder = exported(drawn.options, drawn.launcher, drawn.config, place)
        if folder is not None:
            return drawn, folder, refused
    return draws[-1], None, len(draws)


def _ended(outcome: Outcome, message: str = "") -> dict[str, str]:
    return {"outcome": outcome} | ({"message": message[:400]} if message else {})


def figures_of(row: dict[str, Any]) -> tuple[int, int]:
    """Return what was estimated and what was allocated, by the resumed process if that allocated more."""
    first, resumed = row["allocated"], row.get("resumed_allocated", 0)
    if resumed > first:
        return row.get("resumed_estimated", row["estimated"]), resumed
    return row["estimated"], first


def error_of(row: dict[str, Any]) -> float:
    """Return estimated / allocated - 1 of a start that ran."""
    estimated, allocated = figures_of(row)
    return float(estimated / allocated - 1)


def is_close(row: dict[str, Any]) -> bool:
    """Return whether the estimate of a start that ran is within CLOSE, or a workspace."""
    estimated, allocated = figures_of(row)
    return abs(error_of(row)) <= CLOSE or abs(estimated - allocated) <= WORKSPACE_BYTES


def load_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()] if ROWS.exists() else []


def draws_of(name: str) -> tuple[Drawn, ...]:
    """Return what a name stands for: a fixed start, the start of a row, or a draw on each of its clusters."""
    if fixed := (STARTS | SERVED_STARTS).get(name):
        return (fixed,)
    seed, number = map(int, name.split("-"))
    for each in load_rows():
        if (each["seed"], each["number"]) == (seed, number):
            started = Drawn(
                seed=seed, number=number, options=tuple(each["options"]), launcher=each["launcher"],
                config=USERS_YAML if each["own_yaml"] else "", resumes=each["resumes"],
            )  # fmt: skip
            return (started,)
    return tuple(drawn_start(seed, number, cluster) for cluster in range(CLUSTERS))


def run(seed: int, count: int) -> None:
    """Start the first `count` draws of a seed that have no row yet, and append each row as it is ready."""
    done = {(each["seed"], each["number"]) for each in load_rows()}
    append_rows(f"{seed}-{number}" for number in range(count) if (seed, number) not in done)


def append_rows(names: Iterable[str]) -> None:
    for name in names:
        with tempfile.TemporaryDirectory(prefix="plan-start-", ignore_cleanup_errors=True) as work:
            text = json.dumps(row(draws_of(name), Path(work)))
        with ROWS.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(text, flush=True)


# -- the page ----------------------------------------------------------------------------------------------------------


def page(rows: Iterable[dict[str, Any]]) -> str:
    """Return the page, from the rows."""
    rows = list(rows)
    newest = {_key(each): each for each in rows}
    ran = [each for each in newest.values() if each["outcome"] in STARTED]
    about = (
        "Command lines of `plan` drawn at random (scripts/drawn_starts.py); the exported files, started by their own "
        "script on emulated GPUs (docs/emulated.md) with models cut to two layers of each kind: two steps, an "
        "evaluation where the files have one, a checkpoint of up to 2 GiB, and, in a part of the starts, one step more "
        "from it, unless the plan says that such a run does not resume. "
        "Seed 0 has fixed starts: one for each kind of file, and jobs that users have and no draw reaches. "
        f"A draw has {CLUSTERS} clusters: the first with a plan is used, and those before it are counted as refused. "
        "A start passes if all of that ran, and what PyTorch allocated at most is within "
        f"{CLOSE:.0%} of `plan estimate --config train.yaml`. Each row of emulated_starts.jsonl names its commit; of a "
        "draw that was started again the newest row counts."
    )
    measured = f"Measured at commit {rows[-1]['commit']}; nothing computes these figures anew."
    lines = ["# Recommendations that were started", "", measured, "Made by `python -m scripts.emulated_starts`.", ""]
    lines += [
        *wrap(about, 118),
        "",
        f"| seed | {' | '.join(get_args(Outcome))} | clusters refused | median error | evaluated | resumed |",
    ]
    lines += ["|---" * (len(get_args(Outcome)) + 5) + "|"]
    seeds = {each["seed"]: [other for other in newest.values() if other["seed"] == each["seed"]] for each in rows}
    lines += [_seed_line(str(seed), members) for seed, members in sorted(seeds.items())]
    lines += [_seed_line("all", list(newest.values()))]
    types, methods = {each["model_type"] for each in ran}, {each["options"][5] for each in ran}
    counts = Counter(each["sharding"] for each in ran)
    shown = ", ".join(f"{name} {count}" for name, count in counts.most_common())
    kinds = {
        "with images": ["--images-per-row" in each["options"] for each in ran],
        "with SLURM's script": [SLURM_FILE in each["files"] for each in ran],
        "for torchrun": [each["launcher"] == "torchrun" for each in ran],
        "into the user's own yaml": [each["own_yaml"] for each in ran],
    }
    counted = ", ".join(f"{sum(members)} {name}" for name, members in kinds.items())
    started = f"Started: {len(types)} model types, {len(methods)} methods; by sharding: {shown}; {counted}."
    lines += ["", *wrap(started, 118)]
    lines += ["", "## Layers and experts that Transformers divides", ""]
    lines += ["| what | ranks | of which ran | estimated | allocated | error |", "|---" * 6 + "|"]
    lines += [_divided_line(each) for each in ran if SCHEMES[each["sharding"]].loads_divided]
    lines += ["", "## Starts that did not pass", ""]
    lines += ["| seed, number | what | outcome | error | cause or message | started again |", "|---" * 6 + "|"]
    lines += [_miss_line(each, newest[_key(each)]) for each in rows if each["outcome"] in MISSED]
    return "\n".join(lines).rstrip() + "\n"


def _seed_line(name: str, rows: list[dict[str, Any]]) -> str:
    outcomes = Counter(each["outcome"] for each in rows)
    errors = [error_of(each) for each in rows if each["outcome"] in ("passed", "off")]
    figures = [str(outcomes[outcome]) for outcome in get_args(Outcome)]
    figures += [str(sum(each.get("refused", 0) for each in rows))]
    figures += [f"{median(errors):+.2%}" if errors else "", str(sum(each.get("evaluated", False) for each in rows))]
    figures += [str(sum("resumed_allocated" in each and each["outcome"] != "not resumed" for each in rows))]
    return f"| {name} | {' | '.join(figures)} |"


def _divided_line(row: dict[str, Any]) -> str:
    ranks, sizes = row["num_processes"], [f"{size / GIB:.2f} GiB" for size in figures_of(row)]
    real = ranks if ranks <= REAL_PROCESSES else 1
    return f"| {' '.join(row['options'])} | {ranks} | {real} | {' | '.join(sizes)} | {error_of(row):+.2%} |"


def _key(row: dict[str, Any]) -> tuple[int, int]:
    return row["seed"], row["number"]


def _miss_line(row: dict[str, Any], newest: dict[str, Any]) -> str:
    cause = CAUSES.get(f"{row['seed']}-{row['number']} at {row['commit']}", row.get("message", ""))
    again = "" if newest is row else f"{newest['outcome']} {_error(newest)} at {newest['commit']}"
    found = [row["launcher"], *(row[name] for name in ("sharding", "quantization") if name in row)]
    what = f"{' '.join(row['options'])} ({', '.join(found)})"
    cells = [f"{row['seed']}, {row['number']}", what, row["outcome"], _error(row), cause.replace("|", "/"), again]
    return f"| {' | '.join(cells)} |"


def _error(row: dict[str, Any]) -> str:
    ran = row["outcome"] in ("passed", "off", "not resumed")
    return f"{error_of(row):+.1%}, {row['estimated'] / GIB:.2f} GiB estimated" if ran else ""


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 100)
    elif sys.argv[1] == "again":
        append_rows(sys.argv[2:])
    elif sys.argv[1] == "one":
        name, work = sys.argv[2], Path(sys.argv[3])
        work.mkdir(parents=True)
        print(json.dumps(row(draws_of(name), work), indent=1))
    else:
        PAGE.write_text(page(load_rows()), encoding="utf-8")
