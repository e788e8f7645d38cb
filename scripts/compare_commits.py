"""Compare the predictions of two commits on the same jobs, and require that commit messages name what moved.

    python -m scripts.compare_commits                 the working tree with `base_commit`
    python -m scripts.compare_commits OLD [NEW]       the working tree, or the commit NEW, with OLD
    python -m scripts.compare_commits --jobs 600      600 jobs instead of 3,000, as `make` runs it

The base is the newest commit at least 3 hours older than HEAD: what was there before one piece of work. A figure
moved if it changed by more than 1 %: the bytes of a phase, `host`, `nvidia-smi`, `speed` (tokens a second); `answer`
moved if it is another of fits, tight, does not fit and refused. It is named if a commit after OLD has a trailer whose
words are each a kind of the job (method, tuning, scheme, quantization, model type), or the figure, or `all`:

    Moves: zero3 full load

Exit 1: a figure moved that no trailer names. A folder without an older commit is not compared, and passes.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, count, islice
from pathlib import Path
from statistics import median
from typing import Any

from msgspec import Struct

from planner.methods import MethodName
from planner.models.catalogue import load_model, model_rows
from planner.settings.table import has_setting
from scripts.drawn_starts import drawn_start
from scripts.emulated_grid import HELD_OUT, load_rows
from scripts.freeze_estimates import arguments

ROOT = Path(__file__).resolve().parents[1]
SCRIPT, SIDE = "scripts/compare_commits.py", "scripts/predict_jobs.py"
SEED, DRAWN = 11, 3000
# Judged: longer than the commits of one piece of work lie apart.
BASE_AGE_SECONDS = 3 * 3600
MOVED = 0.01
SHOWN_JOBS = 3  # of each figure that nothing names
NAMED_OTHERWISE = ("model", "method", "tuning", "trl_version", "image_size")  # no settings, but arguments of `estimate`

Job = dict[str, Any]


# -- jobs --------------------------------------------------------------------------------------------------------------


def drawn_jobs() -> Iterator[Job]:
    """Yield arguments of `planner.estimate`: in turn a job of the emulated grid, a random candidate, a random start.

    Models whose layers are measured come from the grid only: the layers of others are not shipped.
    """
    rows = [*load_rows(), *load_rows(HELD_OUT)]
    random.Random(SEED).shuffle(rows)
    known = [row.id for row in model_rows() if load_model(row.id).known]
    draw = random.Random(SEED)
    starts = (options for number in count() if (options := drawn_start(SEED, number).options)[1] in known)
    for row, start in zip(rows, starts):  # noqa: B905 (starts do not end)
        yield recorded_job(row)
        yield job_of_words(arguments(draw, known))
        yield job_of_words(start)


def recorded_job(row: dict[str, Any]) -> Job:
    """Return the job of a row of results/emulated.jsonl, which has fields of a candidate."""
    settings: Job = {"method": "sft", "max_length": 2048, "per_device_train_batch_size": 1, "padded": False}
    settings |= row["settings"]
    method: MethodName = settings["method"]
    kept = {name: value for name, value in settings.items() if name in NAMED_OTHERWISE or has_setting(method, name)}
    if kept.get("quantization") and kept.get("tuning") == "lora":
        kept["tuning"] = "qlora"
    if "image_size" in kept:
        kept["image_size"] = "x".join(map(str, kept["image_size"]))
    return {"gpus": row["gpus"], **kept}


def job_of_words(words: Sequence[str]) -> Job:
    """Return the job of a command line: `--flag value`, `--set name=value`, `--padded` and `--no-padded`."""
    job: Job = {}
    left = iter(words)
    for flag in left:
        if flag in ("--padded", "--no-padded"):
            job["padded"] = flag == "--padded"
        elif flag == "--set":
            name, _, value = next(left).partition("=")
            job[name] = value
        else:
            value = next(left)
            job[flag[2:].replace("-", "_")] = int(value) if value.isdigit() else value
    return job


# -- commits -----------------------------------------------------------------------------------------------------------


def git(*words: str) -> str:
    """Return what git prints; empty if it fails or is not there."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout.strip()


def base_commit() -> str:
    """Return the newest commit at least 3 hours older than HEAD, at the earliest the one that added this script.

    Empty if this is no clone, or a shallow one.
    """
    if git("rev-parse", "--is-shallow-repository") != "false":
        return ""
    made = int(git("log", "-1", "--format=%ct"))
    first = git("log", "--diff-filter=A", "--format=%H", "--", SCRIPT).split("\n")[-1]
    older = git("log", "-1", "--format=%H", f"--before={made - BASE_AGE_SECONDS}", f"{first}..HEAD") if first else ""
    return older or first


def trailers(old: str, new: str) -> list[frozenset[str]]:
    """Return the words of each trailer of the commits after `old`."""
    text = git("log", "--format=%(trailers:key=Moves,valueonly)", f"{old}..{new or 'HEAD'}")
    return [frozenset(line.split()) for line in text.splitlines() if line.strip()]


def start(commit: str, jobs: Path, folder: Path) -> "subprocess.Popen[str]":
    """Start the predictions of a commit, or of the working tree if it is empty, which are written to `folder`."""
    folder.mkdir()
    root = check_out(commit, folder / "tree") if commit else ROOT
    command = [sys.executable, "-m", "scripts.predict_jobs", str(jobs), str(folder / "predictions")]
    # An own cache: measurements of this machine's user change predictions.
    environment = {**os.environ, "PYTHONPATH": str(root), "PLAN_CACHE": str(folder / "cache")}
    return subprocess.Popen(command, cwd=root, env=environment, text=True, stderr=subprocess.PIPE)


def check_out(commit: str, root: Path) -> Path:
    """Write a commit's `planner` and `probes` to a new folder, with today's script beside them; git keeps no record."""
    root.mkdir()
    packed = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "planner", "probes"], stdout=subprocess.PIPE, check=True
    )
    subprocess.run(["tar", "-x", "-C", str(root)], input=packed.stdout, check=True)
    (root / SIDE).parent.mkdir()
    shutil.copy(ROOT / SIDE, root / SIDE)
    return root


# -- what moved --------------------------------------------------------------------------------------------------------


class Move(Struct, frozen=True, kw_only=True):
    """One figure of one job that moved. `change`: relative change of the figure, 0 if the answer changed."""

    job: Job
    kinds: tuple[str, ...]
    figure: str
    words: str
    change: float = 0.0

    def is_named(self, named: Sequence[frozenset[str]]) -> bool:
        return any(words <= {*self.kinds, self.figure, "all"} for words in named)


def moves(job: Job, old: dict[str, Any], new: dict[str, Any]) -> Iterator[Move]:
    """Yield what moved from one prediction to another."""
    said = tuple(new["kinds"] or old["kinds"])
    if old["answer"] != new["answer"]:
        yield Move(job=job, kinds=said, figure="answer", words=f"{old['answer']} -> {new['answer']}")
    if "refused" in (old["answer"], new["answer"]):
        return
    for figure in sorted(old["figures"].keys() | new["figures"].keys()):
        before, after = (each["figures"].get(figure, 0) for each in (old, new))
        if abs(after - before) > MOVED * before:
            change = after / before - 1 if before else 1.0
            yield Move(job=job, kinds=said, figure=figure, words=f"{before:,.0f} -> {after:,.0f}", change=change)


def report(found: Sequence[Move], named: Sequence[frozenset[str]]) -> Iterator[str]:
    """Yield a line for each figure that moved, and the jobs of those that nothing names."""
    by_figure: dict[str, list[Move]] = {}
    for each in found:
        by_figure.setdefault(each.figure, []).append(each)
    for figure, members in sorted(by_figure.items()):
        changes = [each.change for each in members]
        words = f"{median(changes):+.1%} in the median, worst {max(changes, key=abs):+.1%}"
        if figure == "answer":
            words = ", ".join(f"{each} {times}" for each, times in Counter(each.words for each in members).items())
        yield f"{figure}: {len(members)} jobs, {words}"
        kinds = Counter(word for each in members for word in each.kinds)
        yield f"    {', '.join(f'{word} {count}' for word, count in kinds.most_common())}"
        unnamed = [each for each in members if not each.is_named(named)]
        if unnamed:
            common = set.intersection(*(set(each.kinds) for each in unnamed))
            yield f"    {len(unnamed)} not named; what they share: Moves: {' '.join([*sorted(common), figure])}"
        for each in unnamed[:SHOWN_JOBS]:
            yield f"    {each.words}: {json.dumps(each.job)}"


def compare(old: str, new: str, drawn: int) -> int:
    """Compare the predictions of two commits on `drawn` jobs, print what moved, and return the exit code."""
    jobs = list(islice(drawn_jobs(), drawn))
    named = trailers(old, new)
    with tempfile.TemporaryDirectory() as folder:
        asked, sides = Path(folder) / "jobs", [Path(folder) / "old", Path(folder) / "new"]
        asked.write_text("".join(json.dumps(job) + "\n" for job in jobs), encoding="utf-8")
        started = [start(commit, asked, side) for commit, side in zip((old, new), sides, strict=True)]
        errors = [each.communicate()[1] for each in started]
        if any(each.returncode for each in started):
            print(*errors, f"Not predicted. A commit that changes what {SIDE} reads says `Moves: all`.", sep="\n")
            return 0 if {"all"} in named else 1
        lines = [(side / "predictions").read_text(encoding="utf-8").splitlines() for side in sides]
    rows = [(job, json.loads(one), json.loads(other)) for job, one, other in zip(jobs, *lines, strict=True)]
    found = list(chain.from_iterable(moves(*row) for row in rows))
    planned = sum(after["answer"] != "refused" for _, _, after in rows)
    print(f"{old[:9]} beside {new[:9] or 'the working tree'}: {drawn} jobs, {planned} planned, {len(found)} moves")
    print("\n".join(report(found, named)))
    return 0 if all(each.is_named(named) for each in found) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("commits", nargs="*", metavar="COMMIT")
    parser.add_argument("--jobs", type=int, default=DRAWN)
    options = parser.parse_args()
    commits = [git("rev-parse", "--verify", f"{word}^{{commit}}") for word in options.commits]
    if not all(commits) or len(commits) > 2:
        parser.error(f"not one or two commits: {' '.join(options.commits)}")
    old, new, *_ = [*(commits or [base_commit()]), ""]
    if not old:
        print("Not compared: no older commit is here.")
        return 0
    return compare(old, new, options.jobs)


if __name__ == "__main__":
    sys.exit(main())
