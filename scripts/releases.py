"""Run jobs of the emulated grid with the newest releases of the training stack, and write results/releases.md.

    python -m scripts.releases ENVIRONMENT FOLDER [COUNT]

ENVIRONMENT is one of scripts/emulated_environment.sh, at the releases of constraints.txt. An environment with the
newest releases of all libraries is built in FOLDER and runs COUNT jobs that together cover each method, loss, scheme
and quantization. A job whose figures differ from results/emulated.jsonl also runs in ENVIRONMENT and with each new
release alone. Environments and rows that are in FOLDER already are used as they are.

The page also lists the citations in planner/ and probes/ whose cited code changed.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from textwrap import wrap
from typing import Any

from msgspec import Struct

from scripts.citations import cited, definitions, has, matching, symbols
from scripts.emulated_grid import append_rows, load_rows
from scripts.emulated_jobs import Job
from scripts.mutate import commit

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "results" / "releases.md"
LIBRARIES = ("torch", "transformers", "trl", "peft", "accelerate", "deepspeed", "bitsandbytes", "liger-kernel")
FOLLOWS = {"torch": "torchvision"}  # a library's other half: pip takes the release that fits
ALL = "all"
JOBS = 40
LISTED = 60  # citations that the page lists

Row = dict[str, Any]


# -- releases ----------------------------------------------------------------------------------------------------------


class Release(Struct, frozen=True, kw_only=True):
    """A library's pinned release, the registry's newest, and the newest that pip installs here."""

    library: str
    pinned: str
    newest: str
    taken: str

    @property
    def is_new(self) -> bool:
        return self.taken != self.pinned


def release_of(library: str) -> Release:
    """Return the releases of a library; pip may be held to older ones by its configuration."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = re.findall(rf"^{library}==([\w.]+)", text, re.MULTILINE)[0]
    versions = available(library)
    for version in versions:
        if version == pinned or installs(f"{library}==={version}"):
            return Release(library=library, pinned=pinned, newest=versions[0], taken=version)
    raise AssertionError(f"pip installs no release of {library}")


def available(library: str) -> list[str]:
    """Return the final releases in the registry, the newest first."""
    found = pip("index", "versions", library).stdout
    listed = re.search(r"Available versions: (.*)", found)
    assert listed, found
    return [each for each in listed[1].split(", ") if re.fullmatch(r"[\d.]+", each)]


def installs(requirement: str) -> bool:
    """Return whether pip installs a requirement."""
    return pip("install", "--dry-run", "--no-deps", "--ignore-installed", "-q", requirement).returncode == 0


def pip(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True, check=False)


# -- environments and runs ---------------------------------------------------------------------------------------------


def environment(folder: Path, releases: Sequence[Release]) -> float:
    """Make an environment with some newer releases unless it is there, and return how many seconds that took."""
    began = time.monotonic()
    if not folder.exists():
        text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
        for each in releases:
            text = re.sub(rf"^{each.library}==[\w.]+", f"{each.library}=={each.taken}", text, flags=re.MULTILINE)
            other = FOLLOWS.get(each.library)
            text = re.sub(rf"^{other}==.*\n", "", text, flags=re.MULTILINE) if other else text
        constraints = folder.with_suffix(".txt")
        constraints.write_text(text, encoding="utf-8")
        script = ROOT / "scripts" / "emulated_environment.sh"
        subprocess.run([str(script), str(folder)], env={**os.environ, "CONSTRAINTS": str(constraints)}, check=True)
    return time.monotonic() - began


def run(python_of: Path, rows: Path, jobs: Iterable[Job]) -> dict[str, Row]:
    """Run jobs in an environment unless `rows` has them, and return the rows by the jobs' keys."""
    done = {key for key, row in rows_in(rows).items() if row["outcome"] in ("fits", "out_of_memory")}
    left = [{"kind": each.kind, "gpus": each.gpus, "settings": each.settings} for each in jobs if each.key not in done]
    if left:
        asked = rows.with_suffix(".asked")
        asked.write_text("".join(json.dumps(each) + "\n" for each in left), encoding="utf-8")
        command = [str(python_of / "bin" / "python"), "-m", "scripts.releases", "run", str(asked), str(rows)]
        subprocess.run(command, cwd=ROOT, check=True)
    return rows_in(rows)


def rows_in(file: Path) -> dict[str, Row]:
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {job_of(row).key: row for row in map(json.loads, lines)}


def job_of(row: Row) -> Job:
    return Job(kind=row["kind"], gpus=row["gpus"], settings=row["settings"])


def chosen(count: int) -> list[Job]:
    """Return at most `count` recorded jobs that cover all features: most new features first, then the shortest run."""
    rows = [row for row in load_rows() if row["outcome"] == "fits"]
    has_all = {id(row): features(row) for row in rows}
    left = set().union(*has_all.values())
    found: list[Job] = []
    while rows and left and len(found) < count:
        best = max(rows, key=lambda row: (len(has_all[id(row)] & left), -row["seconds"]))
        found.append(job_of(best))
        rows.remove(best)
        left -= has_all[id(best)]
    return found


def features(row: Row) -> frozenset[str]:
    """What a job has that a release can change."""
    at = job_of(row).candidate
    axes = (f"loss {at.loss}", f"scheme {at.sharding}", f"quantization {at.quantization}", f"tuning {at.tuning}")
    return frozenset({*axes, f"method {at.method}", f"attention {at.attn_implementation}", f"optimizer {at.optim}"})


def moved(before: Row, after: Row) -> dict[str, int]:
    """Return by how many bytes each changed figure of a run differs; a changed outcome is a key with 0.

    Rows from before scripts/recorded_worker.py wrote a figure lack it.
    """
    kept = [name for name in ("reserved", "needed", "requested") if before.get(name) and after.get(name)]
    figures = {name: after[name] - before[name] for name in kept}
    names = before["allocated"].keys() | after["allocated"].keys()
    figures |= {name: after["allocated"].get(name, 0) - before["allocated"].get(name, 0) for name in names}
    outcome = {f"{before['outcome']} -> {after['outcome']}": 0} if before["outcome"] != after["outcome"] else {}
    return outcome | {name: size for name, size in sorted(figures.items()) if size}


# -- citations ---------------------------------------------------------------------------------------------------------


@cache
def package(python_of: Path, library: str) -> Path:
    """Return the folder of a library in an environment."""
    code = "import importlib.util, sys; print(*importlib.util.find_spec(sys.argv[1]).submodule_search_locations)"
    command = [str(python_of / "bin" / "python"), "-c", code, library.replace("-", "_")]
    return Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())


def changed_citations(library: str, old: Path, new: Path) -> Iterator[tuple[str, str, str]]:
    """Yield file, symbol and kind of change for each citation of a library whose cited code changed.

    Only Python: an installed library has no C++ sources.
    """
    ours = {(file, symbol) for _, named, _, file, symbol in cited() if named == library}
    folder = package(old, library)
    found = {(path, symbol) for file, symbol in ours for path in matching(folder, file) if has(symbol, symbols(path))}
    for path, symbol in sorted(found):
        place = path.relative_to(folder)
        other = package(new, library) / place
        if not other.exists():
            yield str(place), symbol, "the file is gone"
        elif not has(symbol, symbols(other)):
            yield str(place), symbol, "the name is gone"
        elif definitions(path, symbol) != definitions(other, symbol):
            yield str(place), symbol, "other code"


# -- the page ----------------------------------------------------------------------------------------------------------


# What a reading of the changed code found, by release.
READINGS = {
    "torch 2.14.1": (
        "FSDP2's `_post_forward`, `pre_forward`, `post_backward` and `_init_sharded_param` run under a switch of a new "
        "type checker, and do what they did. Ring attention returns the random state of its first block, not of its "
        "last: a few bytes, and right gradients with dropout. Adagrad and RMSprop take a tensor as learning rate. "
        "`_create_c10d_store` asks whether the agent's store serves this address; `memory_stats` is written otherwise. "
        "Nothing of it is a fact of memory. That is in the C++ of memory-efficient attention "
        "(results/torch_releases.md, `SINCE_TORCH`), which no citation of Python shows."
    ),
    "torch 2.15.0": (
        "Read in the Python of the wheel, not run. FSDP2 was written anew in part. Gradients that accumulate "
        "without a reduction are added by autograd in place to those in the reduction's dtype "
        "(`FSDPParamGroup._set_unsharded_grad_dtypes`; `to_accumulated_grad_if_needed` is gone): from the second "
        "micro-batch on the gradients of one layer in 16 bits are no more beside the whole ones. Sharded "
        "gradients are cast in one flat buffer for each dtype and are views of it "
        "(`_cast_and_view_sharded_grads`). What is kept from step to step has the same size; the temporaries of a "
        "layer are not counted by release. `all_reduce` of the functional collectives, device meshes and the rest "
        "move no memory."
    ),
    "transformers 5.24.0": (
        "Most rename `past_key_values` and `cache_params` to `cache`, and do nothing else; TRL 1.16 names neither. "
        "`GradientCheckpointingLayer` checkpoints no more without gradients, where nothing was saved before either. "
        "`_check_and_adjust_attn_implementation` refuses a FlashAttention kernel of the Hub for a model without "
        "FlashAttention, which no plan takes. `_build_kernel_mapping` takes version 5 of kernels of the Hub. "
        "`_MODEL_TO_CONVERSION_PATTERN` has two types more, `is_torch_bf16_gpu_available` and "
        "`is_torch_tf32_available` one device more. Facts of memory, found by 2,846 tests of library facts that ran "
        "with 5.24, of which 17 failed: `DynamicLayer` takes the values' dtype from the values, so that the KV cache "
        "of `generate` under autocast with float32 weights is three quarters of what is counted (6 tests); routers of "
        "glm4_moe are float32 (1 test, 768 saved bytes). And of what runs: Gemma 3 with images, PaliGemma and "
        "diffusion_gemma refuse FlashAttention (3 tests), add_adapter wants PEFT 0.22, which is not released "
        "(adapters load and train with 0.21.2). The other 7 are a deprecated name in a test of ours (5) and the new "
        "types lara_mini and exaone (2). Files that plan exports pin 5.23, for which all are right."
    ),
}
# vLLM, whose engines are not run here: its wheels were read.
VLLM = (
    "TRL 1.16 takes vLLM 0.22 to 0.31; 0.32 and 0.33 are in the registry, and `--vllm-version` plans them. Of their "
    "Python 19 citations have other code than in 0.31. Facts of memory: since 0.32 the buffer in which experts compute "
    "is discarded while the engine sleeps, and cuBLAS's handles are made before the memory baseline (a few MiB, not "
    "counted); since 0.33 a DGX Spark's server has the batches of a small card; 0.33 requires torch 2.14. They take "
    "transformers below 5.20 and 5.21, 0.31 below 5.18, 0.19 to 0.30 any newer one. The block tables, the penalties' "
    "counts, groups of layers and pages of the KV cache are as in 0.31. What older releases had is in "
    "planner/settings/vllm_releases.py, read in the wheels of 0.12, 0.14 and 0.17 to 0.31, each with its first "
    "release; vllm-project/vllm#50780 (since 0.26 the profile of CUDA graphs of hybrid models counts a transient: 18 "
    "to 24 % less KV cache) is not counted: its size by batch is not known."
)
HEAD = "| library | constraints.txt | newest in the registry | run here |\n|---|---|---|---|"


def page(releases: Sequence[Release], runs: Sequence[str], cited: Sequence[str]) -> str:
    """Return the page: the releases, the runs and the citations."""
    dated = f"Measured at commit {commit()[:7]}; nothing computes these figures anew."
    lines = ["# Newest releases of the training stack", "", dated, "", *wrap(WORDS, 118), ""]
    lines += [HEAD, *(f"| {each.library} | {each.pinned} | {each.newest} | {each.taken} |" for each in releases), ""]
    lines += ["## Jobs", "", *runs, "", "## vLLM", "", *wrap(VLLM, 118), ""]
    lines += ["## Citations whose code is another one", "", *cited]
    return "\n".join(lines).rstrip() + "\n"


WORDS = (
    "`python -m scripts.releases ENVIRONMENT FOLDER COUNT` makes an environment with the newest releases and runs jobs "
    "of the emulated grid in it. Those whose bytes are not the recorded ones run again with constraints.txt, and with "
    "each new release alone. vLLM's engines are not run."
)


def run_lines(jobs: Sequence[Job], found: dict[str, dict[str, Row]]) -> Iterator[str]:
    """Yield a line for each job that moved, with the bytes in each environment where they are not the pinned ones."""
    yield f"{len(jobs)} jobs ran with the newest releases together, which have:"
    yield ""
    shared = sorted(frozenset[str]().union(*(features(found[ALL][job.key]) for job in jobs)))
    yield from wrap(", ".join(shared) + ".", 118)
    yield ""
    pinned = found["pinned"]
    count = 0
    for job in jobs:
        steps = {name: moved(pinned[job.key], rows[job.key]) for name, rows in found.items() if job.key in rows}
        steps = {name: sizes for name, sizes in steps.items() if sizes and name != "pinned"}
        if steps:
            count += 1
            settings = ", ".join(f"{name} {value}" for name, value in job.settings.items())
            yield f"- {job.gpus}: {settings}"
            for name, sizes in steps.items():
                yield f"  - {name}: {', '.join(f'{figure} {size:+,}' for figure, size in sizes.items())}"
    yield f"\n{count} of {len(jobs)} jobs have other bytes than with constraints.txt; the others are equal to the byte."


def main(base: Path, folder: Path, count: int = JOBS) -> None:
    began = time.monotonic()
    releases = [release_of(library) for library in LIBRARIES]
    new = [each for each in releases if each.is_new]
    print(*(f"{each.library} {each.pinned} -> {each.taken}" for each in new), sep="\n", flush=True)
    if not new:
        PAGE.write_text(page(releases, ["No release is newer than those of constraints.txt."], []), encoding="utf-8")
        return
    jobs = chosen(count)
    built = environment(folder / ALL, new)
    recorded = {job_of(row).key: row for row in load_rows()}
    found = {ALL: run(folder / ALL, folder / f"{ALL}.jsonl", jobs)}
    other = [job for job in jobs if moved(recorded[job.key], found[ALL][job.key])]
    found["pinned"] = recorded | run(base, folder / "pinned.jsonl", other)
    other = [job for job in other if moved(found["pinned"][job.key], found[ALL][job.key])]
    if len(new) > 1 and other:
        for each in new:
            built += environment(folder / each.library, [each])
            rows = run(folder / each.library, folder / f"{each.library}.jsonl", other)
            found[f"{each.library} {each.taken} alone"] = rows
    cited = []
    for each in new:
        lines = [
            f"- {each.library}: {place}, `{symbol}`: {what}"
            for place, symbol, what in changed_citations(each.library, base, folder / ALL)
        ]
        cited += [*lines[:LISTED], f"- {each.library}: {len(lines)} in all.", ""]
        read = READINGS.get(f"{each.library} {each.taken}")
        cited += [*wrap(f"Read: {read}", 118), ""] if read else []
    took = f"The environments took {built:.0f} s, all of it {time.monotonic() - began:.0f} s."
    PAGE.write_text(page(releases, [*run_lines(jobs, found), "", took], cited), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "run":
        given = map(json.loads, Path(sys.argv[2]).read_text(encoding="utf-8").splitlines())
        append_rows((job_of(each) for each in given), Path(sys.argv[3]))
    else:
        at, made_in, *rest = sys.argv[1:]
        main(Path(at).absolute(), Path(made_in).absolute(), *map(int, rest))
