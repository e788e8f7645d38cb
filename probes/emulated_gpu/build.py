"""Build the emulated libraries with a C++ compiler, once for the same sources, compiler and needed functions."""

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from planner.errors import InputError
from planner.files.cache import cache_root, require_folder, temporary_prefix
from probes.emulated_gpu.libraries import Functions, needed_functions
from probes.emulated_gpu.machine import refuse_elsewhere

DRIVER = Path(__file__).parent / "driver"
CORE = "libcuda.so.1"
# Sources by library. Every other function that the installed packages need does nothing and returns 0.
SOURCES: dict[str, tuple[str, ...]] = {
    "libcuda": ("memory.cpp", "timeline.cpp", "driver.cpp"),
    "libcudart": ("runtime.cpp",),
    "libcublas": ("blas.cpp",),
    "libcublasLt": ("blas.cpp",),
    "libcudnn": ("dnn.cpp",),
    "libnccl": ("nccl.cpp",),
    "libnvrtc": ("nvrtc.cpp",),
    "libnvidia-ml": ("nvml.cpp",),
}
ALWAYS = (CORE, "libnvidia-ml.so.1")  # programs look them up while they run
RUNTIME = "libcudart.so.13"  # of the CUDA release whose layouts the sources have
FLAGS = ("-std=c++17", "-O1", "-fPIC", "-fno-builtin", "-w")
# Values other than 0 that functions without a source return: versions that PyTorch checks, and codes for absent
# features.
VALUES = {
    "cudnnGetVersion": 99900,  # at least the one that PyTorch was built with (torch/backends/cudnn/__init__.py)
    "cudnnGetCudartVersion": 13000,
    "cuptiSubscribe": 1,  # no profiler
    "cuFileDriverOpen": 5000,  # no GPUDirect Storage
}
TEXT = re.compile(r"(Error|LastError|Status|Result)(String|Name)$|^cuptiGetResultString$")


def built_libraries() -> Path:
    """Return the folder of the emulated libraries; build them if there are none for this environment.

    Raises:
        InputError: this is not Linux on x86-64, PyTorch is no CUDA 13 build, or there is no compiler.
    """
    refuse_elsewhere()
    needed = needed_functions()
    if RUNTIME not in needed:
        raise InputError(
            "An emulated GPU needs PyTorch's build for CUDA 13, whose libraries it replaces; this one "
            f"{'needs ' + _runtimes(needed) if _runtimes(needed) else 'is for the CPU'}. "
            "scripts/emulated_environment.sh makes an environment."
        )
    compiler = find_compiler()
    key = hashlib.sha256(repr((compiler, sorted((name, sorted(each)) for name, each in needed.items()))).encode())
    for source in (Path(__file__), *sorted(DRIVER.iterdir())):
        key.update(source.read_bytes())
    folder = cache_root() / "emulated-gpu" / key.hexdigest()[:16]
    if not folder.is_dir():
        _build(folder, compiler, {**dict.fromkeys(ALWAYS, Functions()), **needed})
    return folder


def _runtimes(needed: Iterable[str]) -> str:
    return ", ".join(name for name in needed if name.startswith("libcudart"))


def find_compiler() -> tuple[str, ...]:
    """Return the command of this machine's C++ compiler, or of the `ziglang` package.

    Raises:
        InputError: there is neither.
    """
    named = os.environ.get("CXX")
    for name in (named, "g++", "clang++", "c++"):
        if name and (path := shutil.which(name)):
            return (path,)
    if find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "c++")
    raise InputError(
        "An emulated GPU needs a C++ compiler once, and there is no g++ or clang++: pip install ziglang brings one."
    )


def _build(folder: Path, compiler: Sequence[str], needed: dict[str, Functions]) -> None:
    """Build every library into a temporary folder and rename it, so that a folder that exists is complete."""
    require_folder(folder.parent)
    prefix = temporary_prefix("build", str(folder.parent))
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as parent:
        made = Path(parent) / "libraries"
        made.mkdir()
        for library in sorted(needed, key=lambda name: name != CORE):  # the others link to the core
            if library.startswith(("libcudart", "libcublas")) and not library.endswith(RUNTIME[-3:]):
                continue  # bitsandbytes has a build for each CUDA release
            _link(made, Path(parent), compiler, library, needed[library])
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():  # else another process was faster
                raise


def _link(made: Path, work: Path, compiler: Sequence[str], library: str, functions: Functions) -> None:
    """Build one library: its sources, and functions that do nothing for all that they lack."""
    sources = [DRIVER / name for name in SOURCES.get(library.partition(".")[0], ())]
    lacking = work / f"{library}.cpp"
    own = "\n".join(source.read_text(encoding="utf-8") for source in sources)
    lacking.write_text(
        "#include <cstdlib>\n" + "".join(_stub(name) for name, _ in sorted(functions) if f" {name}(" not in own),
        encoding="utf-8",
    )
    script = work / f"{library}.map"
    version = max((version for _, version in functions), default="")
    core = () if library == CORE else ("-L", str(made), f"-l:{CORE}", "-Wl,-rpath,$ORIGIN")
    command = [*compiler, *FLAGS, "-shared", *map(str, sources), str(lacking), f"-I{DRIVER}", f"-Wl,-soname,{library}"]
    if version:
        script.write_text(f"{version} {{ global: *; }};\n", encoding="utf-8")
        command.append(f"-Wl,--version-script={script}")
    code, said = _run_alone([*command, *core, "-ldl", "-lpthread", "-o", str(made / library)], work)
    if code:
        raise RuntimeError(f"The compiler could not build {library}:\n{said[-4000:]}")


def _run_alone(command: Sequence[str], work: Path) -> tuple[int, str]:
    """Run a compiler with its temporary files in `work`; return its exit code and stderr.

    If we are interrupted, the processes that it has started are ended with it.
    """
    environment = {**os.environ, "TMPDIR": str(work)}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as compiler:
        try:
            _, said = compiler.communicate()
        except BaseException:
            os.killpg(compiler.pid, signal.SIGKILL)
            raise
    return compiler.returncode, said


def _stub(function: str) -> str:
    """Return the source of a function that does nothing. One that creates something returns memory for it."""
    if TEXT.search(function):
        return f'extern "C" const char* {function}() {{ return "emulated"; }}\n'
    if "Create" in function:
        return f'extern "C" int {function}(void** made) {{ if (made) *made = calloc(1, 1024); return 0; }}\n'
    return f'extern "C" int {function}() {{ return {VALUES.get(function, 0)}; }}\n'
