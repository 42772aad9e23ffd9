#!/bin/sh
# Check and measure the framework on a machine with one CUDA card, within nine minutes.
#
#   scripts/gpu_check.sh OUT_DIR [--dry-run] [--skip LETTERS]
#
# Parts, in this order; each writes into OUT_DIR as soon as it has something, and a part that fails stops no other:
#   a machine.json      processor, AMX, what `hybridattn doctor` says
#   b conformance.json  kernels against the float64 oracle, bf16 included; the kernel tests where pytest is present
#   e policies.json     Llama-3.1-8B shape, small GPU budget: three policies at CPU:GPU ratios 0.5 to 16
#   c kernels.json      bandwidth of decode attention as a share of a device copy
#   d kernels.json      the CPU kernels as a share of this processor's read bandwidth
#   f tokens.json       equal token ids under every policy, fp32
#   g trace.json        two iterations, for Perfetto
# --dry-run goes the same way on the host device with tiny sizes. Needs python3 with torch, triton, llvmlite (numba brings it) and transformers.
set -u

ROOT=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python3}
TOTAL=${GPU_CHECK_SECONDS:-525}
OUT= SKIP= DRY=
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) DRY=--dry-run ;;
    --skip) SKIP=${2:?--skip needs letters, for example cd}; shift ;;
    -*) echo "gpu_check: unknown option $1" >&2; exit 2 ;;
    *) OUT=$1 ;;
    esac
    shift
done
if [ -z "$OUT" ]; then
    echo "usage: scripts/gpu_check.sh OUT_DIR [--dry-run] [--skip LETTERS]" >&2
    exit 2
fi
mkdir -p "$OUT" || exit 2
START=$(date +%s)
FAILED=
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

for entry in a:30 b:110 e:200 c:55 d:45 f:50 g:40; do
    part=${entry%%:*} limit=${entry##*:}
    case $SKIP in *"$part"*) echo "== part $part: skipped"; continue ;; esac
    left=$((TOTAL - ($(date +%s) - START)))
    [ "$left" -lt "$limit" ] && limit=$left
    if [ "$limit" -lt 10 ]; then
        echo "== part $part: no time left"
        FAILED=$FAILED$part
        continue
    fi
    echo "== part $part: at most $limit s"
    # shellcheck disable=SC2086  # $DRY is one word or none
    if ! timeout -k 5 "$limit" "$PYTHON" -m scripts.gpucheck "$part" "$OUT" --budget $((limit - 6)) $DRY; then
        echo "== part $part: failed"
        FAILED=$FAILED$part
    fi
done
echo "== $(($(date +%s) - START)) s; failed parts: ${FAILED:-none}"
[ -z "$FAILED" ]
