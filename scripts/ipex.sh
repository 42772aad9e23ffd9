#!/usr/bin/env bash
# The environment of the ipex back end (it needs torch 2.8, so it is not the project's own), then the conformance suite
# of the CPU kernels and the benchmark in it. Usage: scripts/ipex.sh [DIR]; DIR is reused when it exists (6.8 GB).
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
env=${1:-$root/.venv-ipex}
if [ ! -x "$env/bin/python" ]; then
  python3 -m venv "$env"
fi
"$env/bin/pip" install -q "torch==2.8.0" "intel-extension-for-pytorch==2.8.0" numpy llvmlite pytest hypothesis
cd "$root"
export PYTHONPATH=$root
"$env/bin/python" -m cpu_kernels.doctor
"$env/bin/python" -m pytest -p no:cacheprovider -o addopts="--import-mode=importlib -q" -o filterwarnings=default \
  -m "not slow" tests/cpu_kernels/test_decode.py tests/cpu_kernels/test_merge.py tests/cpu_kernels/test_backends.py
peers=$(mktemp -d)
trap 'rm -rf "$peers"' EXIT
ln -s "$env" "$peers/ipex"
"$env/bin/python" -m cpu_kernels.bench --json --sets reference --peers "$peers"
