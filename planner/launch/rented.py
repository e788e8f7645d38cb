"""Files that take one machine and start the folder there: of clouds, of Kubernetes, of a SLURM cluster."""

import json
from functools import partial
from math import ceil

from planner.candidate import Candidate
from planner.files.texts import launch_text
from planner.gpus.hf_jobs import FLAVORS_OF, cheapest_flavor
from planner.launch.placement import placement
from planner.launch.shell import LAUNCH_FILE, title
from planner.launch.site import Site
from planner.launch.trl_config import FILL_IN
from planner.units import GIB

_text = partial(launch_text, "rented")

SKY_FILE, DSTACK_FILE, HF_JOBS_FILE = "sky.yaml", "dstack.yml", "hf_jobs.sh"
KUBEFLOW_FILE, MODAL_FILE, SUBMITIT_FILE = "kubeflow.yaml", "modal_app.py", "submitit_job.py"

# Card -> its name at Modal, which has up to 8 of them in a machine. Source: modal.com/docs/guide/gpu.md.
MODAL_CARDS = {
    "T4": "T4", "L4": "L4", "A10G": "A10", "A100-40G": "A100-40GB", "L40S": "L40S", "A100-80G": "A100-80GB",
    "H100-SXM": "H100", "RTX-PRO-6000": "RTX-PRO-6000", "H200": "H200", "B200": "B200",
}  # fmt: skip
MODAL_GPUS, MODAL_HOURS = 8, 24
# The time limit of a run with known data is twice the estimated time of TRL's default number of epochs.
# Source: transformers 5.23, training_args.py, `num_train_epochs`; the error of estimated speeds, docs/accuracy.md.
EPOCHS, TIMES_AS_LONG = 3, 2
# What pip takes of a disk that comes with the machine: the wheels of requirements.txt, 2.86 GB without vLLM, which it
# keeps, and their files, 2.6 times as much (torch 2.13 with CUDA 13, trl 1.16, peft 0.21, deepspeed 0.19 on PyPI, 27
# November 2026; torch and triton unpacked). The data come beside it.
ENVIRONMENT_BYTES = round(2.86e9 * (1 + 2.6))
USUAL_DISK_GB, OTHER_DISK_GB = 256, 100  # SkyPilot's default (`disk_size`); room for the environment and the data


def rented_files(candidate: Candidate, site: Site | None) -> dict[str, str]:
    """The texts of the files for one machine, by file name.

    `site`: None if no report says which machines were planned for; then there is SkyPilot's alone.
    """
    files = {SKY_FILE: sky_task(candidate, site)}
    if site is None or not site.cards:
        return files
    texts = {
        DSTACK_FILE: dstack_task(candidate, site),
        HF_JOBS_FILE: hf_job(candidate, site),
        KUBEFLOW_FILE: kubeflow_job(candidate, site),
        MODAL_FILE: modal_app(candidate, site),
        SUBMITIT_FILE: submitit_job(candidate, site),
    }
    return files | {name: text for name, text in texts.items() if text}


def sky_task(candidate: Candidate, site: Site | None = None) -> str:
    """The text of sky.yaml, a SkyPilot task that installs and starts the folder on one node.

    It asks for any of the cards on which the plan fits, of which SkyPilot takes the cheapest.
    Source: SkyPilot's YAML specification, docs/source/reference/yaml-spec.rst; `workdir` is copied to the machine.
    """
    gpus, cards = placement(candidate).gpus_per_node, site.skypilot_cards if site is not None else ()
    lines = [f'  accelerators: "GPU:{gpus}"  # {FILL_IN}: SkyPilot\'s name of the card, as in A100-80GB:{gpus}']
    if cards:
        lines = ["  any_of:", *(f'    - accelerators: "{card}:{gpus}"' for card in cards)]
    if site is not None and site.host_bytes:
        lines += [f'  memory: "{_gigabytes(site.host_bytes)}+"', f"  disk_size: {_disk_gigabytes(site)}"]
    return _text("sky").format(
        title=title(candidate), fill_in=FILL_IN, file=SKY_FILE, launch=LAUNCH_FILE,
        resources="".join(f"{line}\n" for line in lines), of_train="of train.yaml " if cards else "",
    )  # fmt: skip


def dstack_task(candidate: Candidate, site: Site) -> str:
    """The text of dstack.yml, a task for any NVIDIA card that is large and new enough.

    Source: dstack 0.22.5, _internal/core/models/resources.py, `ResourcesSpec`, and configurations.py.
    """
    major, minor = site.least_capability
    return _text("dstack").format(
        title=title(candidate), fill_in=FILL_IN, file=DSTACK_FILE, launch=LAUNCH_FILE,
        gpus=placement(candidate).gpus_per_node, card_gb=site.card_gigabytes, capability=f"{major}.{minor}",
        host_gb=_gigabytes(site.host_bytes), disk_gb=_disk_gigabytes(site),
    )  # fmt: skip


def hf_job(candidate: Candidate, site: Site) -> str:
    """The text of hf_jobs.sh, which starts the folder on Hugging Face Jobs; empty if none of its machines fits."""
    gpus = placement(candidate).gpus_per_node
    flavor = cheapest_flavor(site.cards, gpus, site.host_bytes, site.disk_bytes + ENVIRONMENT_BYTES)
    if flavor is None:
        return ""
    hours, why = _hours(site)
    return _text("hf_jobs").format(
        title=title(candidate), fill_in=FILL_IN, file=HF_JOBS_FILE, launch=LAUNCH_FILE, flavor=flavor.name,
        price=flavor.price, source=FLAVORS_OF,
        timeout=f"{hours}h  # {why}",
    )  # fmt: skip


def kubeflow_job(candidate: Candidate, site: Site) -> str:
    """The text of kubeflow.yaml, a TrainJob of Kubeflow Trainer on one node."""
    return _text("kubeflow").format(
        title=title(candidate), fill_in=FILL_IN, file=KUBEFLOW_FILE, launch=LAUNCH_FILE,
        gpus=placement(candidate).gpus_per_node, host_gb=_gigabytes(site.host_bytes), disk_gb=_disk_gigabytes(site),
    )  # fmt: skip


def modal_app(candidate: Candidate, site: Site) -> str:
    """The text of modal_app.py, which starts the folder at Modal; empty if none of its cards fits.

    Source: modal 1.6.4, app.py, `App.function`; its disk of 512 GiB is more than any plan here asks for.
    """
    gpus, (hours, why) = placement(candidate).gpus_per_node, _hours(site)
    cards = [f"{MODAL_CARDS[card]}:{gpus}" for card in site.cards if card in MODAL_CARDS]
    if not cards or gpus > MODAL_GPUS:
        return ""
    return _text("modal").format(
        title=title(candidate), fill_in=FILL_IN, file=MODAL_FILE, launch=LAUNCH_FILE, gpus=json.dumps(cards),
        host_mib=_gigabytes(site.host_bytes) * 1024, seconds=min(hours, MODAL_HOURS) * 3600,
        why=why if hours <= MODAL_HOURS else f"Modal's longest; {hours} hours may be needed",
    )  # fmt: skip


def submitit_job(candidate: Candidate, site: Site) -> str:
    """The text of submitit_job.py, which starts the folder on a node of a SLURM cluster."""
    gpus, (hours, why) = placement(candidate).gpus_per_node, _hours(site)
    return _text("submitit").format(
        title=title(candidate), fill_in=FILL_IN, file=SUBMITIT_FILE, launch=LAUNCH_FILE,
        gpus=gpus, cpus=4 * gpus, host_gb=_gigabytes(site.host_bytes), minutes=hours * 60, why=why,
    )  # fmt: skip


def _hours(site: Site) -> tuple[int, str]:
    """The hours after which a job may be stopped, and where they are from."""
    hours = ceil(site.epoch_seconds * EPOCHS * TIMES_AS_LONG / 3600)
    if hours:
        return hours, f"twice what {EPOCHS} epochs are estimated to take"
    return 24, f"{FILL_IN}: the job is stopped after it"


def _gigabytes(size_bytes: int) -> int:
    return ceil(size_bytes / GIB)


def _disk_gigabytes(site: Site) -> int:
    """The disk of a rented machine: models and checkpoints, the environment and the data."""
    return max(USUAL_DISK_GB, _gigabytes(site.disk_bytes) + OTHER_DISK_GB)
