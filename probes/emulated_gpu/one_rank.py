"""Start rank 0 of a training alone: `python -m probes.emulated_gpu.one_rank ARGUMENTS`, those of `accelerate launch`.

Accelerate's launcher reads its own files and sets its own environment; where it would start torchrun's agent with all
ranks of a node, this process becomes rank 0.
"""

import argparse
import os
import sys
from typing import NoReturn

import torch.distributed.run
from accelerate.commands.launch import launch_command, launch_command_parser

from probes.substitution import substituted
from probes.task import free_port


def become_rank_0(arguments: argparse.Namespace) -> NoReturn:
    """Replace this process by the training script as rank 0 of all. Called with torchrun's arguments."""
    here = int(arguments.nproc_per_node)
    ranks = {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "GROUP_RANK": 0,
        "WORLD_SIZE": here * int(str(arguments.nnodes).partition(":")[0]),
        "LOCAL_WORLD_SIZE": here,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    os.environ.update({name: str(value) for name, value in ranks.items()})
    script = ["-m", arguments.training_script] if arguments.module else [arguments.training_script]
    os.execv(sys.executable, [sys.executable, *script, *arguments.training_script_args])


if __name__ == "__main__":
    with substituted(torch.distributed.run, "run", become_rank_0):
        launch_command(launch_command_parser().parse_args())
