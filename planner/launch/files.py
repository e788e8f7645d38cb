"""All launch files of a candidate."""

from functools import partial

from planner.candidate import Candidate
from planner.errors import InputError, printable, shortened
from planner.jobs.dialects.write import config_of_tool
from planner.launch import accelerate, deepspeed, requirements, trl_config
from planner.launch.command import SCRIPT_FILE
from planner.launch.readme import README_FILE, readme
from planner.launch.rented import rented_files
from planner.launch.script import REWARDS, needs_script, train_script
from planner.launch.shell import LAUNCH_FILE, SLURM_FILE, launch_script, slurm_script
from planner.launch.site import Site
from planner.launch.torchrun import sharding_settings
from planner.launch.trl_config import Launcher
from planner.launch.user_config import merged_yaml
from planner.methods import release

# The first release whose ModelConfig has `dtype`; `TrlParser` of others raises "Unknown arguments from config file".
# Source: trl 0.22 and 0.23, trainer/model_config.py.
SINCE_DTYPE = (0, 23)


def launch_files(
    candidate: Candidate, launcher: Launcher = "accelerate", site: Site | None = None, config: str | None = None
) -> dict[str, str]:
    """The texts of the launch files by file name.

    `launcher`: torchrun reads no accelerate.yaml, so that train.yaml has the sharding. `site`: None if no report says
    which machines were planned for. `config`: the text of the user's own train.yaml, which is kept and changed.

    Raises:
        InputError: TRL has no argument for a setting, or the processes cannot be divided evenly among the nodes; a name
            has control characters, or the TRL release is none, or has other names of arguments.
    """
    _refuse_injection(candidate)
    if candidate.tool != "trl":
        return _files_of_tool(candidate, config)
    if release(candidate.trl_version) < SINCE_DTYPE:
        raise InputError(
            f"Files are written for TRL 0.23 and newer: {candidate.trl_version} stops at the key dtype. "
            "Leave out --trl-version, and keys that only older releases have: max_seq_length is max_length."
        )
    sharding = {} if launcher == "accelerate" else sharding_settings(candidate)
    write = trl_config.train_yaml if config is None else partial(merged_yaml, config)
    files = {trl_config.FILE: write(candidate, launcher, sharding)}
    if launcher == "accelerate":
        files[accelerate.FILE] = accelerate.accelerate_yaml(candidate)
    if candidate.scheme_row.stage:
        files[deepspeed.FILE] = deepspeed.deepspeed_json(candidate)
    if needs_script(candidate):
        files[SCRIPT_FILE] = train_script(candidate)
    if trl_config.needs_reward_function(candidate) and f"{trl_config.REWARD_MODULE}." in "".join(files.values()):
        files[f"{trl_config.REWARD_MODULE}.py"] = REWARDS
    files[requirements.FILE] = requirements.requirements(candidate)
    if candidate.num_nodes > 1:
        files[SLURM_FILE] = slurm_script(candidate, launcher, site)
    else:
        files[LAUNCH_FILE] = launch_script(candidate, launcher)
        files |= rented_files(candidate, site)
    return {**files, README_FILE: readme(candidate, files, launcher, site)}


START = """#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "$0")"
{command}
"""


def _files_of_tool(candidate: Candidate, config: str | None) -> dict[str, str]:
    """The files of a plan for another tool: its own config, and the command that trains with it.

    Raises:
        InputError: there is no config of the tool, it has no key for a setting, or there are several nodes.
    """
    row = candidate.tool_row
    files = {trl_config.FILE: config_of_tool(candidate, config, trl_config.FILE)}
    if candidate.num_nodes > 1:
        raise InputError(f"Files for {row.name} are written for one node. Start it on {candidate.num_nodes} yourself.")
    if candidate.scheme_row.stage:
        files[deepspeed.FILE] = deepspeed.deepspeed_json(candidate)
    command = row.start.format(file=trl_config.FILE, processes=candidate.num_processes)
    return {**files, requirements.FILE: f"{row.requirement}\n", LAUNCH_FILE: START.format(command=command)}


def _refuse_injection(candidate: Candidate) -> None:
    """Raise InputError for a name that would begin a line of its own in a script or in requirements.txt."""
    release(candidate.trl_version)
    for model in (candidate.model, candidate.reward_model, candidate.teacher_model):
        for name in (model.id, model.path) if model is not None else ():
            if not printable(name):
                raise InputError(f"The model {shortened(name)} has characters that are not printable. Rename it.")
