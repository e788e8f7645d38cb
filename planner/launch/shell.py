"""launch.sh for one node, slurm.sh for several, and sky.yaml for a rented machine with one node."""

import shlex

from planner.candidate import Candidate
from planner.launch import accelerate
from planner.launch.command import SERVER_PORT, Launcher, launch_command, server_command, torchrun_command
from planner.launch.placement import Placement, placement
from planner.launch.torchrun import environment, rendezvous
from planner.launch.trl_config import FILL_IN

LAUNCH_FILE, SLURM_FILE, SKY_FILE = "launch.sh", "slurm.sh", "sky.yaml"

HEAD = """#!/usr/bin/env bash
# {title}
# Complete the lines of train.yaml marked {fill_in}, then: bash {file}
set -euo pipefail
cd "$(dirname "$0")"
"""
# DeepSpeed's and torch's Adam on the host runs in OpenMP threads, of which `accelerate launch` and torchrun give each
# process one (accelerate 1.15, commands/launch.py, `_validate_launch_command`; torch 2.13, distributed/run.py).
THREADS = """
# the optimizer runs on the CPU, with all of its cores
export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$((($(nproc) + {others}) / {processes}))}}"
"""
SERVER = """
{devices}{command} &
server=$!
trap 'kill "$server" 2> /dev/null || true' EXIT
until curl --silent --fail http://127.0.0.1:{port}/health > /dev/null; do
  kill -0 "$server" # stops here when the server has ended
  sleep 2
done
"""
SKY = """# {title}
# Complete the lines marked {fill_in}, then: sky launch {file}
workdir: .
resources:
  accelerators: "GPU:{gpus}"  # {fill_in}: SkyPilot's name of the card that was planned for, as in A100-80GB:{gpus}
setup: pip install -r requirements.txt
run: bash {launch}
"""
SLURM = """#!/usr/bin/env bash
# {title}
# Complete the lines of train.yaml marked {fill_in}, set your partition and time, then: sbatch {file}
#SBATCH --job-name=finetune
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --time=24:00:00  # {fill_in}
set -euo pipefail
cd "$SLURM_SUBMIT_DIR"
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
{server}
trainers=$(IFS=,; echo "${{nodes[*]:0:{train_nodes}}}")
{start}
"""
SRUN = 'srun --nodes={nodes} --ntasks={nodes} --ntasks-per-node=1 --nodelist="$trainers" \\\n  '
SLURM_SERVER = """
# the server runs on the last node, which it does not share
srun --nodes=1 --ntasks=1 --nodelist="${{nodes[{index}]}}" {command} &
server=$!
trap 'kill "$server" 2> /dev/null || true' EXIT
until curl --silent --fail "http://${{nodes[{index}]}}:{port}/health" > /dev/null; do
  kill -0 "$server" # stops here when the server has ended
  sleep 2
done
"""


# One process that saw several GPUs would use them through DataParallel, which TRL refuses (trl 1.16,
# trainer/sft_trainer.py, `SFTTrainer.__init__` and the other trainers).
ONE_DEVICE = 'CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-0}" '


def title(candidate: Candidate) -> str:
    """The first line of each file: method, model, TRL's release and number of processes."""
    processes = f"{candidate.num_processes} process{'es' if candidate.num_processes > 1 else ''}"
    return f"{candidate.method} of {candidate.model.id} with trl {candidate.trl_version}, {processes}"


def sky_task(candidate: Candidate) -> str:
    """The text of sky.yaml, a SkyPilot task that installs and starts the folder on one node.

    Source: SkyPilot's YAML specification, docs/source/reference/yaml-spec.rst; `workdir` is copied to the machine.
    """
    return SKY.format(
        title=title(candidate), fill_in=FILL_IN, file=SKY_FILE, gpus=placement(candidate).gpus_per_node,
        launch=LAUNCH_FILE,
    )  # fmt: skip


def launch_script(candidate: Candidate, launcher: Launcher = "accelerate") -> str:
    """The text of launch.sh for one node: starts the server if there is one, then the training."""
    placed = placement(candidate)
    text = HEAD.format(title=title(candidate), fill_in=FILL_IN, file=LAUNCH_FILE) + _threads(candidate)
    if placed.server_gpus:
        text += SERVER.format(
            devices=_devices(placed.server_devices), command=shlex.join(server_command(candidate)), port=SERVER_PORT
        )
    devices = ONE_DEVICE if candidate.sharding == "none" and not placed.server_gpus else _devices(placed.train_devices)
    if launcher == "torchrun":
        command = [word for part in torchrun_command(candidate) for word in part]
        devices += "".join(f"{name}={value} " for name, value in environment(candidate).items())
    else:
        command = launch_command(candidate)
    return f'{text}\n{devices}{shlex.join(command)} "$@"\n'


def slurm_script(candidate: Candidate, launcher: Launcher = "accelerate") -> str:
    """The text of slurm.sh for several nodes: one SLURM task on each node starts the processes of that node."""
    placed = placement(candidate)
    server = ""
    if placed.server_gpus:
        command = shlex.join(server_command(candidate))
        server = SLURM_SERVER.format(index=placed.train_nodes, command=command, port=SERVER_PORT)
    start = _torchrun_start(candidate, placed) if launcher == "torchrun" else _accelerate_start(candidate, placed)
    return SLURM.format(
        title=title(candidate),
        fill_in=FILL_IN,
        file=SLURM_FILE,
        nodes=candidate.num_nodes,
        gpus=placed.gpus_per_node,
        train_nodes=placed.train_nodes,
        server=_threads(candidate) + server,
        start=start,
    )


def _threads(candidate: Candidate) -> str:
    """The lines that divide a node's cores between its processes; empty unless the optimizer runs on the CPU."""
    if not candidate.offload_optimizer:
        return ""
    processes = max(1, candidate.num_processes // candidate.num_nodes)
    return THREADS.format(processes=processes, others=processes - 1)


def _accelerate_start(candidate: Candidate, placed: Placement) -> str:
    """The lines of slurm.sh that start accelerate's launcher on each node, in a bash that knows the node's number.

    accelerate's arguments `ranks` must come before the name of a script; after `trl <method>` they may come anywhere.
    """
    ranks = f'--machine_rank "$SLURM_PROCID" --main_process_ip "$1" --main_process_port {accelerate.PORT}'
    command = launch_command(candidate)
    split = len(command) if command[0] == "trl" else len(command) - 3  # train.py --config train.yaml
    before, after = shlex.join(command[:split]), shlex.join(command[split:])
    on_node = _devices("0" * (candidate.sharding == "none")) + f"{before} {ranks} {after}".rstrip()
    host = ""
    if placed.server_gpus:
        on_node += ' --vllm_server_host "$2"'
        host = f' "${{nodes[{placed.train_nodes}]}}"'
    return (
        "# shellcheck disable=SC2016 # each node's own bash expands the quoted words\n"
        f'{SRUN.format(nodes=placed.train_nodes)}bash -c {shlex.quote(on_node)} launch "${{nodes[0]}}"{host}'
    )


def _torchrun_start(candidate: Candidate, placed: Placement) -> str:
    """The lines of slurm.sh that start torchrun on each node; the nodes find their numbers themselves."""
    start, script = (shlex.join(part) for part in torchrun_command(candidate))
    variables = {**environment(candidate), **({"CUDA_VISIBLE_DEVICES": "0"} if candidate.sharding == "none" else {})}
    prefix = "".join(f"{name}={value} " for name, value in variables.items())
    host = f' --vllm_server_host "${{nodes[{placed.train_nodes}]}}"' if placed.server_gpus else ""
    return (
        f"{SRUN.format(nodes=placed.train_nodes)}{'env ' * bool(prefix)}{prefix}"
        f"{start}{rendezvous(candidate)} {script}{host}"
    )


def _devices(visible: str) -> str:
    """The assignment of CUDA_VISIBLE_DEVICES before a command; empty if all GPUs are visible."""
    return f"CUDA_VISIBLE_DEVICES={visible} " if visible else ""
