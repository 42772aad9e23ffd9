#!/bin/sh
# Check and measure the framework on a machine with one CUDA card, within nine minutes. Everything here can be called
# alone; this goes through it in order.
#
#   scripts/gpu_check.sh OUT_DIR [--dry-run] [--skip LETTERS] [--only LETTER]
#
# Parts, in this order; each writes OUT_DIR/NAME.txt while it runs, and a part that fails stops no other:
#   a machine         lscpu, and what `hybridattn doctor` says
#   p prices          what the card's primitives cost: events, replays, hand-overs, copies, page-locking, the decode tile
#                     (OUT_DIR/card.json, a profile of the link that experiments take as hardware.link)
#   b gpu_tests       the tests marked gpu: kernels against the oracle, bf16 included, equal tokens, the device contract
#   c ratio           +experiment=ratio_cuda: three policies at CPU:GPU ratios 0.5 to 16 (rows in OUT_DIR/results)
#   d gpu_bandwidth   decode attention as a share of a device copy
#   e cpu_bandwidth   +experiment=kernels: the CPU kernels as a share of this processor's read loop
#   f kernel_tests    the other tests of the kernels, compiled for this card (without the compile gate, which needs none),
#                     and those of the CPU kernels' instruction sets: AMX where this processor has it
#   g trace           OUT_DIR/trace.json of a short call, for Perfetto
# A part ends as passed, failed or not finished (its time was over); OUT_DIR/summary.txt says which.
# --only runs one part in the terminal, without a limit.
# --dry-run goes the same way on the host device with tiny sizes. Needs what `make install` installs, with torch's CUDA
# build; a part whose packages are missing fails and says so.
set -u

ROOT=$(cd "$(dirname "$0")/.." && pwd)
PYTHON=${PYTHON:-python3}
TOTAL=${GPU_CHECK_SECONDS:-530}
OUT='' SKIP='' ONLY='' DRY=
while [ $# -gt 0 ]; do
    case $1 in
    --dry-run) DRY=1 ;;
    --skip) SKIP=${2:?--skip needs letters, for example cd}; shift ;;
    --only) ONLY=${2:?--only needs a letter, for example c}; shift ;;
    -*) echo "gpu_check: unknown option $1" >&2; exit 2 ;;
    *) OUT=$1 ;;
    esac
    shift
done
if [ -z "$OUT" ]; then
    echo "usage: scripts/gpu_check.sh OUT_DIR [--dry-run] [--skip LETTERS] [--only LETTER]" >&2
    exit 2
fi
mkdir -p "$OUT" || exit 2
OUT=$(cd "$OUT" && pwd)
cd "$ROOT" || exit 2
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

DEVICE=cuda TRITON_INTERPRET=0 RATIO='' KERNELS='' BENCH='' TOKENS=32
TESTS='tests/gpu_kernels tests/cpu_kernels/test_codegen.py'
if [ -n "$DRY" ]; then
    DEVICE=host TRITON_INTERPRET=1 BENCH=--dry-run TOKENS=4 TESTS=tests/gpu_kernels/test_merge.py
    RATIO='settings.gpu_requests=2 settings.ratio=0.5,2 settings.prompt_tokens=20 settings.max_model_len=256'
    RATIO="$RATIO settings.window_s=0.15"
    KERNELS='settings.group=4 settings.tokens=256 settings.total_tokens=2048 settings.rounds=2'
fi
export TRITON_INTERPRET
GATE='--ignore=tests/gpu_kernels/test_compile_gate.py'

pytest_of() { # MARKS PATHS...: every test, slow ones too where the marks say so; no test stops another
    marks=$1; shift
    "$PYTHON" -m pytest -o addopts= --import-mode=importlib --strict-markers -v -rs -p no:cacheprovider -m "$marks" "$@"
}

# shellcheck disable=SC2086  # the settings are several words, or none
run_part() {
    case $1 in
    a) lscpu 2>&1 | grep -v '^Flags'; "$PYTHON" -m hybridattn.cli doctor --json ;;
    p) "$PYTHON" -m hybridattn.calibration.card --out "$OUT/card.json" $BENCH ;;
    b) pytest_of gpu tests/gpu_kernels tests/devices tests/engine ;;
    c) "$PYTHON" -m experiments.run +experiment=ratio_cuda device=$DEVICE "results_root=$OUT/results" $RATIO ;;
    d) "$PYTHON" -m gpu_kernels.bench --json $BENCH ;;
    e) "$PYTHON" -m experiments.run +experiment=kernels settings.dtype=bf16 "results_root=$OUT/results" $KERNELS ;;
    f) pytest_of 'not gpu and not slow and not bench and not peers' $TESTS $GATE ;;
    g) "$PYTHON" -m hybridattn.cli generate --device $DEVICE --cpu-fraction 0.5 --max-tokens $TOKENS --ignore-eos \
        --trace "$OUT/trace.json" 'The capital of France is' 'Water is' ;;
    *) echo "gpu_check: there is no part '$1'" >&2; return 2 ;;
    esac
}

if [ -n "$ONLY" ]; then
    run_part "$ONLY"
    exit
fi

START=$(date +%s)
WORST=0
: >"$OUT/summary.txt"
say() { echo "== part $1 $2: $3" | tee -a "$OUT/summary.txt"; }
for entry in a:machine:30 p:prices:40 b:gpu_tests:150 c:ratio:200 d:gpu_bandwidth:60 e:cpu_bandwidth:60 f:kernel_tests:60 g:trace:60; do
    part=${entry%%:*} limit=${entry##*:} name=${entry#*:}
    name=${name%:*}
    case $SKIP in *"$part"*) say "$part" "$name" skipped; continue ;; esac
    left=$((TOTAL - ($(date +%s) - START)))
    [ "$left" -lt "$limit" ] && limit=$left
    if [ "$limit" -lt 10 ]; then
        say "$part" "$name" 'not finished: no time was left'
        WORST=1
        continue
    fi
    echo "== part $part $name: at most $limit s"
    # INT first: then pytest and the experiments still say what they have
    timeout -s INT -k 5 "$limit" sh "$ROOT/scripts/gpu_check.sh" "$OUT" --only "$part" ${DRY:+--dry-run} \
        >"$OUT/$name.txt" 2>&1
    status=$?
    tail -n 12 "$OUT/$name.txt"
    case $status in
    0) say "$part" "$name" passed ;;
    124 | 137) say "$part" "$name" "not finished within $limit s"; WORST=1 ;;
    *) say "$part" "$name" "failed (exit status $status)"; WORST=1 ;;
    esac
done
echo "== $(($(date +%s) - START)) s"
exit $WORST
