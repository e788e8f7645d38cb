"""The environment in which a program runs on an emulated machine instead of NVIDIA's driver and libraries."""

import atexit
import ctypes
import os
import shutil
import sys
import tempfile
from pathlib import Path

from planner.files.cache import temporary_prefix
from planner.gpus.catalogue import load_gpu
from probes.emulated_gpu.build import built_libraries
from probes.emulated_gpu.machine import Machine, write_machine

MACHINE_FILE = "machine"
MACHINE = "PLAN_EMULATED_MACHINE"  # environment variable: path of the machine file; driver/memory.cpp reads it
PLUGIN = "plan_emulated_gpu"
ALWAYS = {
    # no nvcc compiles DeepSpeed's kernels (deepspeed 0.19.8, ops/op_builder/builder.py)
    "DS_IGNORE_CUDA_DETECTION": "1",
    "DS_SKIP_CUDA_CHECK": "1",
    # its kernels are compiled while vLLM runs, which takes NVIDIA's compiler
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # copies of weights take no time here: threads that load them would run ahead of what is done with them
    # (transformers 5.23, core_model_loading.py)
    "HF_DEACTIVATE_ASYNC_LOAD": "1",
}


def machine_environment(machine: Machine, folder: Path) -> dict[str, str]:
    """Write a machine's file into a folder and return the environment variables of its processes.

    The folder also gets the data that ranks exchange; whoever removes it removes all of the machine.

    Raises:
        InputError: the libraries cannot be built here; the message names the reason.
    """
    libraries = built_libraries()
    path = folder / MACHINE_FILE
    write_machine(machine, path)
    found = sorted(libraries.iterdir(), key=lambda library: library.name != "libcuda.so.1")
    return {
        **ALWAYS,
        MACHINE: str(path),
        "LD_PRELOAD": os.pathsep.join(map(str, found)),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(libraries), os.environ.get("LD_LIBRARY_PATH")])),
        "TRITON_LIBCUDA_PATH": str(
            libraries
        ),  # Triton links a launcher to libcuda (triton 3.7, backends/nvidia/driver.py)
    }


def lend_libraries() -> None:
    """Load the libraries into this process, after its import of PyTorch has failed for want of NVIDIA's.

    Then PyTorch can be imported after all, as `scripts/emulated_environment.sh` installs it. Nothing runs on the card,
    an A100-40G: layers are measured on fake tensors.

    Raises:
        InputError: the libraries cannot be built here.
    """
    folder = Path(tempfile.mkdtemp(prefix=temporary_prefix("libraries")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    environment = machine_environment(Machine(gpu=load_gpu("A100-40G"), cards=1), folder)
    os.environ[MACHINE] = environment[MACHINE]
    for library in environment["LD_PRELOAD"].split(os.pathsep):
        if "nvidia-ml" not in library:  # the cards of this machine are still asked for by the real one
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        del sys.modules[name]  # what the import that failed has left


def plugin_environment() -> dict[str, str]:
    """Return the environment of a vLLM server that a program on an emulated machine starts; elsewhere nothing."""
    if MACHINE not in os.environ:
        return {}
    folder = plugin_folder(Path(os.environ[MACHINE]).parent)
    return {"PYTHONPATH": os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(folder)]))}


def plugin_folder(machine: Path) -> Path:
    """Write a plugin of vLLM that computes the values that steer it into a machine's folder, and return its own folder.

    vLLM loads plugins in each of its processes by the entry points of installed packages (vllm 0.31,
    plugins/__init__.py, `load_general_plugins`).
    """
    folder = machine / "plugin"
    package = folder / f"{PLUGIN}-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGIN}\nVersion: 1\n", encoding="utf-8")
    (package / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\n{PLUGIN} = probes.emulated_gpu.values:keep_small_values_on_host\n", encoding="utf-8"
    )
    return folder
