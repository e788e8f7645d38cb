"""Read the config files of a job: TRL's, accelerate's and DeepSpeed's, and what `--free` gives to the search."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct, field
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.errors import InputError, UnknownName
from planner.gpus.cluster import Cluster
from planner.jobs.job import SPLITS, Job, effective_batch_size
from planner.jobs.settings import NAMING_HINT, fields_named, is_shown, setting_names
from planner.quantities import Note
from planner.requests.options import JobOptions, SearchOptions, config_paths
from planner.settings.setting import Value
from planner.settings.table import LENGTH_SETTINGS, details_of

if TYPE_CHECKING:
    from planner.requests.train_config import TrainConfig

# Field of `train_config.ConfigFiles` -> field of the options.
CONFIG_FLAGS = {"train": "config", "accelerate": "accelerate_config", "deepspeed": "deepspeed_config"}
# Candidate fields that the effective batch is made of.
BATCH_FIELDS = (*SPLITS, "num_processes", "sharding", "cp_size", "sp_size", "tp_size")


class FromFiles(Struct, frozen=True, kw_only=True):
    """The settings of the config files. `untruncated`: TRL does not cut the rows; `launch_file`: one is accelerate's.

    `method` and `trl_version` are those of an exported train.yaml; None: no file says them. `older`: keys that only
    older releases of TRL have, and the last one that has it.
    """

    settings: Mapping[str, Value] = field(default_factory=dict)
    warnings: tuple[Note, ...] = ()
    untruncated: bool = False
    launch_file: bool = False
    method: str | None = None
    trl_version: str | None = None
    older: Mapping[str, str] = field(default_factory=dict)


def config_text(options: JobOptions) -> str | None:
    """Return the text of the TRL config of the options, which exported files keep; None: there is none.

    Raises:
        InputError: it cannot be read.
    """
    if options.config is None:
        return None
    from planner.files.yaml import read_yaml_text

    return read_yaml_text(Path(options.config))


def config_files(options: JobOptions, train: "TrainConfig | None", flags: Mapping[str, object]) -> FromFiles:
    """Return what the config files say.

    `train`: a TRL config that was read already, instead of a file. `flags`: see `ConfigFiles`.
    """
    paths = {name: Path(path) for name, flag in CONFIG_FLAGS.items() if (path := getattr(options, flag)) is not None}
    if not paths and train is None:
        return FromFiles()
    from planner.requests.train_config import FILE_DEFAULTS, SEARCH_DEFAULTS, ConfigFiles, load_config_files

    defaults = SEARCH_DEFAULTS if isinstance(options, SearchOptions) else FILE_DEFAULTS
    files = ConfigFiles(**paths, method=options.method or "", flags=flags)
    config = load_config_files(files, defaults, train)
    return FromFiles(
        settings=config.settings,
        warnings=config.warnings,
        untruncated=config.untruncated,
        launch_file=config.accelerate is not None,
        method=config.method or None,
        trl_version=config.trl_version or None,
        older=config.older,
    )


def freed(options: JobOptions) -> set[str]:
    """Return the Candidate fields of `--free`, with the details that only their values in the files have.

    Raises:
        InputError: there is no config file, or the search does not decide the setting.
        UnknownName: a name that no library has.
    """
    if not isinstance(options, SearchOptions) or not options.free:
        return set()
    names = [name.strip() for given in options.free for name in given.split(",")]
    from planner.search.knobs import SEARCHED

    if not any(config_paths(options)):
        raise InputError(f"--free {names[0]} frees a setting of a config file, and there is none. Give --config.")
    decided = SEARCHED | ({*LENGTH_SETTINGS} if options.optimize == "max-length" else set())
    for name in names:
        if name not in setting_names():
            raise UnknownName("setting", name, setting_names(), hint=NAMING_HINT)
        if not fields_named([name]) <= decided:
            other = "--optimize max-length" if name in LENGTH_SETTINGS else f"--set {name}=..."
            raise InputError(f"--free {name} leaves nothing to decide: no search changes it. Use {other}.")
    free = fields_named(names)
    if not free.isdisjoint(SPLITS):
        free = free.union(SPLITS)  # one follows from the other, as the effective batch stays
    return free.union(*(details_of(field, "run") for field in free))


def with_batch_of_files(job: Job, cluster: Cluster, in_files: Mapping[str, Any], free: set[str]) -> Job:
    """Return the job with the effective batch of the files and flags, if the search may divide it otherwise."""
    if job.effective_batch_size is not None or free.isdisjoint(SPLITS):
        return job
    sizes = {name: in_files[name] for name in BATCH_FIELDS if name in in_files}
    sizes |= {name: job.pinned[name] for name in BATCH_FIELDS if name in job.pinned}
    return replace(job, effective_batch_size=effective_batch_size(replace(job, pinned=sizes), cluster))


def without_unread(pinned: Mapping[str, Any], decided: set[str], candidate: Candidate) -> dict[str, Any]:
    """Return the pins without the details of files that flags leave without effect, such as ZeRO's sizes under FSDP.

    `decided`: the fields that flags decide; `candidate`: the pins on TRL's defaults.
    """
    details = {name for field in decided for name in details_of(field)} - decided
    if candidate.scheme_row.offload_setting:
        details.discard("offload_param")  # it has another name there
    return {name: value for name, value in pinned.items() if name not in details or is_shown(candidate, name)}


def with_nodes_of_cluster(
    settings: Mapping[str, Value], cluster: Cluster, launch_file: bool
) -> tuple[dict[str, Value], tuple[Note, ...]]:
    """Return the settings of the files without fewer machines than `--gpus` has, and a warning about that.

    Recipes come with an accelerate file for one machine, and `accelerate launch --num_machines` overrides it.
    """
    machines = settings.get("num_machines")
    if not launch_file or not isinstance(machines, int) or machines >= cluster.nodes:
        return dict(settings), ()
    server = settings.get("use_vllm") and settings.get("vllm_mode") == "server"
    if server and machines == cluster.nodes - 1:
        return dict(settings), ()
    kept = {name: value for name, value in settings.items() if name not in ("num_machines", "num_processes")}
    values = {"machines": machines, "nodes": cluster.nodes, "gpus": cluster.num_gpus}
    return kept, (Note("machines_of_file_overridden", values),)


def with_server_node(
    settings: Mapping[str, Value], cluster: Cluster, in_file: Mapping[str, Value] | None = None
) -> dict[str, Value]:
    """Return the settings with the node of a vLLM server, which accelerate's `num_machines` leaves out.

    `in_file`: settings of the files that flags may have replaced, such as `use_vllm` by `--set vllm_mode=server`.
    """
    uses = settings.get("use_vllm", (in_file or {}).get("use_vllm"))
    server = uses and settings.get("vllm_mode") == "server"
    if server and cluster.nodes > 1 and settings.get("num_machines") == cluster.nodes - 1:
        return {**settings, "num_machines": cluster.nodes}
    return dict(settings)
