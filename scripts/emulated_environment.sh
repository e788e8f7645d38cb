#!/usr/bin/env bash
# Make an environment for `plan --dry-run` and `--device emulated`; its command is DIR/bin/plan.
#
#     scripts/emulated_environment.sh DIR                    the training stack at the releases of constraints.txt
#     scripts/emulated_environment.sh DIR vllm==VERSION      the same with a vLLM, and the torch and Transformers that it takes
#     scripts/emulated_environment.sh DIR --over PYTHON      only what PYTHON's environment lacks, which is used for the rest
#
# CONSTRAINTS=FILE takes the releases of another file than constraints.txt (scripts/releases.py).
# PyTorch is its ordinary (CUDA) build without NVIDIA's libraries, which are 3 GB and which the emulated driver replaces.
set -euo pipefail
dir=$1 what=${2:-} other=${3:-}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
releases=${CONSTRAINTS:-$here/constraints.txt}
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
grep -v '^torch==' "$releases" >"$constraints"
torch=$(sed -n 's/^torch==//p' "$releases")

python3 -m venv "$dir"
pip=("$dir/bin/python" -m pip --disable-pip-version-check)

# The METADATA file of an installed package.
metadata() { echo "$dir"/lib/python3*/site-packages/"${1%%=*}"-*.dist-info/METADATA; }

# Install a package, and drop from its requirements NVIDIA's libraries and kernels that are compiled on first use.
# `===` accepts no build for CPUs, such as 2.13.0+cpu.
without_nvidia() {
    "${pip[@]}" install -q --no-deps "$1"
    sed -i -E '/^Requires-Dist: *(nvidia-|cuda-toolkit|cuda-bindings|flashinfer|quack-kernels|tilelang|humming)/d' "$(metadata "$1")"
}

case $what in
    --over)
        without_nvidia "torch===$torch"
        "${pip[@]}" install -q --no-deps "$(sed -n -E 's/^Requires-Dist: *(triton==[0-9.]+).*/\1/p' "$(metadata torch)")" liger-kernel \
            "$(grep '^torchvision==' "$constraints")" pillow
        "$other" -c 'import sysconfig; print(sysconfig.get_path("platlib"))' >"$(dirname "$(dirname "$(metadata torch)")")/other.pth"
        ;;
    vllm==*)
        without_nvidia "$what"
        without_nvidia "torch===$(sed -n -E 's/^Requires-Dist: *torch==([0-9.]+).*/\1/p' "$(metadata vllm)")"
        # only the training stack is pinned: vLLM asks for other releases of what both need
        grep -E '^(trl|peft|accelerate|datasets|bitsandbytes|optuna|msgspec)==' "$releases" >"$constraints"
        "${pip[@]}" install -q -c "$constraints" "$what" "${here}[probe]"
        ;;
    *)
        without_nvidia "torch===$torch"
        "${pip[@]}" install -q -c "$constraints" "${here}[dryrun]"
        ;;
esac
