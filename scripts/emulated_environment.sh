#!/usr/bin/env bash
# Make an environment for `plan --probe --device emulated`:
#
#     scripts/emulated_environment.sh DIR [vllm==VERSION]      then DIR/bin/plan
#
# It has PyTorch's ordinary (CUDA) build without NVIDIA's libraries, which are 3 GB and which the emulated driver
# replaces; the training stack at the releases of constraints.txt; and this project. With a vLLM it has the releases of
# torch and Transformers that this vLLM asks for.
set -euo pipefail
dir=$1 vllm=${2:-}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
grep -v '^torch==' "$here/constraints.txt" >"$constraints"

python3 -m venv "$dir"
pip=("$dir/bin/python" -m pip --disable-pip-version-check)

# Install a package, and drop NVIDIA's libraries and kernels that are compiled on first use from its requirements.
# `===` does not accept a build for CPUs, 2.13.0+cpu.
without_nvidia() {
    "${pip[@]}" install -q --no-deps "$1"
    sed -i -E '/^Requires-Dist: *(nvidia-|cuda-toolkit|flashinfer|quack-kernels|tilelang|humming)/d' \
        "$dir"/lib/python3*/site-packages/"${1%%[=]*}"-*.dist-info/METADATA
}

if [ -n "$vllm" ]; then
    without_nvidia "$vllm"
    torch=$(sed -n -E 's/^Requires-Dist: *torch==([0-9.]+).*/\1/p' "$dir"/lib/python3*/site-packages/vllm-*.dist-info/METADATA)
    without_nvidia "torch===$torch"
    sed -i -E '/^(transformers|huggingface_hub|tokenizers|numpy|pydantic|pydantic_core|starlette|regex|ninja|einops|filelock)==/d' "$constraints"
    "${pip[@]}" install -q -c "$constraints" "$vllm" "$here[probe]"
else
    without_nvidia "torch===$(sed -n 's/^torch==//p' "$here/constraints.txt")"
    "${pip[@]}" install -q -c "$constraints" "$here[emulated]"
fi
"$dir/bin/plan" --help >/dev/null
echo "$dir/bin/plan --probe --device emulated --model Qwen2.5-0.5B --gpus 1xRTX-3090 --method sft"
