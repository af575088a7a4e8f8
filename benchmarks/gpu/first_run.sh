#!/usr/bin/env bash
# The first run on a GPU, in two commands: docs/design/first-gpu-run.md.
#
#     benchmarks/gpu/first_run.sh kernels.tar.xz             # at most 580 seconds
#     benchmarks/gpu/first_run.sh --second kernels.tar.xz    # at most 180 seconds
#
# kernels.tar.xz: written by `python -m benchmarks.gpu.ahead.cache --pack DIR kernels.tar.xz`.
# PYTHON: the Python that has torch, python3 unless set. OUT: the folder of results, runs/first unless set. Each case and
# each test is written there when it has ended.
set -u

second=no
if [ "${1:-}" = --second ]; then
    second=yes
    shift
fi
if [ $# -ne 1 ] || [ ! -f "$1" ]; then
    echo "usage: benchmarks/gpu/first_run.sh [--second] kernels.tar.xz; ${1:-nothing} is no such file" >&2
    exit 2
fi
archive=$(realpath "$1")
cd "$(dirname "$0")/../.." || exit 2
python=${PYTHON:-python3}
mkdir -p "${OUT:-runs/first}" || exit 2
out=$(realpath "${OUT:-runs/first}")
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
# Named by its content, so that the second command finds what the first one unpacked.
cache=${TMPDIR:-/tmp}/quaver-kernels-$(sha256sum "$archive" | cut -c 1-16)
timeout --signal KILL 20 "$python" -m benchmarks.gpu.ahead.cache "$cache" "$archive" || exit 2
export TRITON_CACHE_DIR=$cache

# step NAME SECONDS COMMAND...: results and output go to a folder of that name. All processes are killed at the limit:
# results are replaced whole, so nothing but the case that was running is lost.
step() {
    local name=$1 seconds=$2 begun=$SECONDS
    shift 2
    mkdir -p "$out/$name"
    OUT=$out/$name timeout --signal KILL "$seconds" "$@" >"$out/$name/log.txt" 2>&1 </dev/null
    echo "$name: exit code $?, $((SECONDS - begun)) of at most $seconds s" | tee -a "$out/steps.txt"
    rm -f "$out/$name"/*.partial
    tail -n 25 "$out/$name/log.txt"
}

# sections NAME SECONDS SECTION...: the run stops beginning cases 20 seconds before the limit.
sections() {
    local name=$1 seconds=$2 section only=()
    shift 2
    for section; do only+=(--only "$section"); done
    step "$name" "$seconds" "$python" -m benchmarks.gpu --cache "$cache" --quick --no-write \
        --seconds $((seconds - 20)) "${only[@]}"
}

# tests NAME SECONDS ARGUMENT...: a kernel that hangs ends its process, a lost CUDA context ends the step.
tests() {
    local name=$1 seconds=$2
    shift 2
    step "$name" "$seconds" "$python" -m pytest -m gpu -q --timeout-method thread -p tests.gpu_context \
        -p tests.gpu_results "$@"
}

if [ $second = no ]; then
    sections 1-ceilings 110 ceilings gemms host
    # Alone, because an empty expert may lose the context.
    tests 2-gemms 40 -n 0 --timeout 30 -k 'not compiled' tests/kernels/test_gemms_on_a_gpu.py \
        tests/torch/backends/gpu/test_grouped_mm.py
    tests 3-kernels 150 -n 8 --dist worksteal --maxfail 40 --timeout 45 tests/kernels tests/gpu
    sections 4-layers 195 kernels linears layer producers attention
else
    tests 5-cuda-graphs 45 -n 0 --timeout 40 tests/gpu/test_graph.py -k compiled_to_cuda_graphs
    sections 6-second 115 graph experts optimizers state-space memory training
fi
