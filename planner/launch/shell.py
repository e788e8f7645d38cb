"""launch.sh for one node, and slurm.sh for several."""

import shlex
from functools import partial

from planner.candidate import Candidate
from planner.files.texts import launch_text
from planner.launch import accelerate
from planner.launch.command import launch_command, server_command, teacher_command, torchrun_command
from planner.launch.placement import Placement, placement
from planner.launch.site import Site
from planner.launch.torchrun import process_variables, rendezvous
from planner.launch.trl_config import FILL_IN, Launcher

_text = partial(launch_text, "shell")

LAUNCH_FILE, SLURM_FILE = "launch.sh", "slurm.sh"

# A step gets one core a task unless it asks for more (slurm, doc/man/man1/srun.1, `--cpus-per-task`).
CPUS = '--cpus-per-task="$SLURM_CPUS_ON_NODE"'
SRUN = f'srun --nodes={{nodes}} --ntasks={{nodes}} --ntasks-per-node=1 {CPUS} --nodelist="$trainers" \\\n  '
# One process that saw several GPUs would use them through DataParallel, which TRL refuses (trl 1.16,
# trainer/sft_trainer.py, `SFTTrainer.__init__` and the other trainers).
ONE_DEVICE = 'CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES-0}" '


def title(candidate: Candidate) -> str:
    """The first line of each file: method, model, TRL's release and number of processes."""
    processes = f"{candidate.num_processes} process{'es' if candidate.num_processes > 1 else ''}"
    return f"{candidate.method} of {candidate.model.id} with trl {candidate.trl_version}, {processes}"


def launch_script(candidate: Candidate, launcher: Launcher = "accelerate") -> str:
    """The text of launch.sh for one node: starts the server if there is one, then the training."""
    placed = placement(candidate)
    text = _text("head").format(title=title(candidate), fill_in=FILL_IN, file=LAUNCH_FILE) + _threads(candidate)
    row, started = candidate.method_row, ""
    for name, command, devices, port in (
        ("server", server_command(candidate), placed.server_devices, row.server_port),
        ("teacher", teacher_command(candidate), placed.teacher_devices, row.teacher_port),
    ):
        if command:
            started = f'{started} "${name}"'.lstrip()
            text += _text("server").format(
                name=name, devices=_devices(devices), command=shlex.join(command), port=port, started=started
            )
    return f'{text}\n{training_line(candidate, launcher)} "$@"\n'


def training_line(candidate: Candidate, launcher: Launcher = "accelerate") -> str:
    """The line of launch.sh that starts the training, without further arguments."""
    placed = placement(candidate)
    devices = (
        ONE_DEVICE if not candidate.scheme_row.launched and not placed.beside_gpus else _devices(placed.train_devices)
    )
    if launcher == "torchrun":
        command = [word for part in torchrun_command(candidate) for word in part]
        devices += "".join(f"{name}={value} " for name, value in process_variables(candidate).items())
    else:
        command = launch_command(candidate)
    return f"{devices}{shlex.join(command)}"


def slurm_script(candidate: Candidate, launcher: Launcher = "accelerate", site: Site | None = None) -> str:
    """The text of slurm.sh for several nodes: one SLURM task on each node starts the processes of that node."""
    placed = placement(candidate)
    server = ""
    if placed.server_gpus:
        command = shlex.join(server_command(candidate))
        server = _text("slurm_server").format(
            index=placed.train_nodes, command=command, port=candidate.method_row.server_port, cpus=CPUS
        )
    start = _torchrun_start(candidate, placed) if launcher == "torchrun" else _accelerate_start(candidate, placed)
    return _text("slurm").format(
        title=title(candidate),
        fill_in=FILL_IN,
        file=SLURM_FILE,
        nodes=candidate.num_nodes,
        need=f"; the plan needs {site.host_need}" if site is not None and site.host_bytes else "",
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
    return _text("threads").format(processes=processes, others=processes - 1)


def _accelerate_start(candidate: Candidate, placed: Placement) -> str:
    """The lines of slurm.sh that start accelerate's launcher on each node, in a bash that knows the node's number.

    accelerate's arguments `ranks` must come before the name of a script; after `trl <method>` they may come anywhere.
    """
    ranks = f'--machine_rank "$SLURM_PROCID" --main_process_ip "$1" --main_process_port {accelerate.PORT}'
    command = launch_command(candidate)
    split = len(command) if command[0] == "trl" else len(command) - 3  # train.py --config train.yaml
    before, after = shlex.join(command[:split]), shlex.join(command[split:])
    on_node = _devices("0" * (not candidate.scheme_row.launched)) + f"{before} {ranks} {after}".rstrip()
    host = ""
    if placed.server_gpus:
        on_node += _server_argument(candidate, "$2")
        host = f' "${{nodes[{placed.train_nodes}]}}"'
    return (
        "# shellcheck disable=SC2016 # each node's own bash expands the quoted words\n"
        f'{SRUN.format(nodes=placed.train_nodes)}bash -c {shlex.quote(on_node)} launch "${{nodes[0]}}"{host}'
    )


def _torchrun_start(candidate: Candidate, placed: Placement) -> str:
    """The lines of slurm.sh that start torchrun on each node; the nodes find their numbers themselves."""
    start, script = (shlex.join(part) for part in torchrun_command(candidate))
    variables = {
        **process_variables(candidate),
        **({"CUDA_VISIBLE_DEVICES": "0"} if not candidate.scheme_row.launched else {}),
    }
    prefix = "".join(f"{name}={value} " for name, value in variables.items())
    host = _server_argument(candidate, f"${{nodes[{placed.train_nodes}]}}") if placed.server_gpus else ""
    return (
        f"{SRUN.format(nodes=placed.train_nodes)}{'env ' * bool(prefix)}{prefix}"
        f"{start}{rendezvous(candidate)} {script}{host}"
    )


def _server_argument(candidate: Candidate, host: str) -> str:
    """The argument of a trainer with the host of its server, after a blank."""
    if candidate.method_row.asynchronous:
        return f' --vllm_server_base_url "http://{host}:{candidate.method_row.server_port}"'
    return f' --vllm_server_host "{host}"'


def _devices(visible: str) -> str:
    """The assignment of CUDA_VISIBLE_DEVICES before a command; empty if all GPUs are visible."""
    return f"CUDA_VISIBLE_DEVICES={visible} " if visible else ""
