#!/usr/bin/env bash
# What a GPU is wanted for, in a slice of some minutes; the same command goes on: bash benchmarks/gpu.sh [MINUTES]
#
# First that CPU and GPU agree, for every method and executor; then seconds a round, into docs/performance.md; then the
# tables of benchmarks/gpu.toml, several runs sharing the GPU. `python evidence/campaign.py status --queue
# benchmarks/gpu.toml --keep runs/gpu/tables` says how far they are, and `publish` with the same options writes the pages.
# KINFED_DATA is the folder of data sets. PYTHON is the interpreter, JOBS how many runs share the GPU, KEEP where
# everything is kept. DEVICE=cpu tries it all where there is no GPU.
set -euo pipefail
cd "$(dirname "$0")/.."
minutes=${1:-8}
device=${DEVICE:-cuda}
keep=${KEEP:-runs/gpu}
python=${PYTHON:-python}
end=$((SECONDS + $(awk "BEGIN { print int(60 * $minutes) }")))
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=1
mkdir -p "$keep"

left() {
  if [ $((end - SECONDS)) -lt 20 ]; then
    echo "the time is over; the same command goes on"
    exit 0
  fi
  echo $((end - SECONDS))
}

for part in "loop" "vmap" "fused" "not loop and not vmap and not fused"; do
  agreed="$keep/agree-${part// /-}.txt"
  if [ ! -e "$agreed" ]; then
    echo "do CPU and GPU agree: $part"
    seconds=$(left) || exit 0
    pretend=()
    if [ "$device" = cpu ]; then pretend=(KINFED_PRETEND=1 PYTHONPATH="$PWD/tests:$PYTHONPATH"); fi
    code=0
    env "${pretend[@]}" timeout "$seconds" "$python" -m pytest -q -p no:cacheprovider -m gpu -k "$part" tests/test_gpu.py \
      > "$agreed.part" 2>&1 || code=$?
    tail -5 "$agreed.part"
    if [ "$code" -eq 124 ]; then exit 0; fi # the time is over; the next slice begins this part again
    if [ "$code" -ne 0 ]; then exit "$code"; fi
    mv "$agreed.part" "$agreed"
  fi
done

seconds=$(left)
code=0
"$python" benchmarks/gpu_rounds.py --device "$device" --keep "$keep/rounds.csv" \
  --minutes "$(awk "BEGIN { print $seconds / 60 }")" ${PAGE:+--page "$PAGE"} ${ONLY:+--only "$ONLY"} || code=$?
if [ "$code" -ne 0 ] && [ "$code" -ne 3 ]; then exit "$code"; fi

seconds=$(left)
"$python" evidence/campaign.py run --queue "${QUEUE:-benchmarks/gpu.toml}" --keep "$keep/tables" --device "$device" \
  --jobs "${JOBS:-6}" --minutes "$(awk "BEGIN { print $seconds / 60 }")"
