#!/usr/bin/env bash
# Everything that only a GPU can show, in one call of less than eight minutes and without a network: tests, figures,
# and the sanitizer. usage, in the repository's root: bash tests/bench/cuda_first_run.sh [FOLDER FOR RESULTS]
#
# What python3 must have is said first, within half a minute: tests/bench/cuda_requirements.py knows the list. With
# pytest-xdist the tests compile on several cores. Wheels of what is lacking are taken from .cuda/wheels, and the models
# that the tests compare from .cuda/shared (a copy of ../shared), if these exist.
set -uo pipefail
results="${1:-${OUT:-cuda_first_run}}"
mkdir -p "$results"
site="$(mktemp -d)"
trap 'rm -rf "$site"' EXIT
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY="$site/hypothesis"
export XDG_CACHE_HOME="$site/cache" XDG_STATE_HOME="$site/state"
export PYTHONPATH="$site/packages:$site/wheels"

if compgen -G ".cuda/wheels/*.whl" >/dev/null; then
    python3 -m pip install -q --no-index --no-deps --no-compile --target "$site/wheels" .cuda/wheels/*.whl
fi
# The package under its real name, as an installed copy has it.
mkdir -p "$site/packages/localinfer"
cp -R localinfer/. kernels models quant "$site/packages/localinfer/"
if [ -d .cuda/shared ] && [ ! -e ../shared ]; then cp -R .cuda/shared ../shared; fi

step() { # step SECONDS NAME COMMAND...
    local limit="$1" name="$2"
    shift 2
    echo "== $name"
    local began=$SECONDS
    timeout --signal=INT --kill-after=10 "$limit" "$@" >"$results/$name.log" 2>&1
    echo "exit $? after $((SECONDS - began)) s" | tee -a "$results/$name.log"
    tail -n 12 "$results/$name.log"
}

if ! timeout --kill-after=5 60 python3 -m tests.bench.cuda_requirements 2>&1 | tee "$results/requirements.log"; then
    echo "nothing was run: put wheels of what is missing into .cuda/wheels, or install it" >&2
    exit 1
fi

together=()
if python3 -c 'import xdist' 2>/dev/null; then together=(-n 8); fi

step 20 environment bash -c 'nvidia-smi; python3 --version; python3 -m pip list 2>/dev/null | grep -iE "torch|numba|cuda|gguf|numpy"'
step 45 products python3 -m pytest -q -m cuda -p no:cacheprovider -x tests/kernels/cuda/test_cuda_on_gpu.py -k "product and Q4_0 or memory"
step 150 bench python3 -m tests.bench.bench_cuda "$results/bench.json"
step 130 tests python3 -m pytest -q -m cuda -p no:cacheprovider "${together[@]}" tests/kernels/cuda/test_cuda_ops_on_gpu.py \
    tests/kernels/cuda/test_cuda_on_gpu.py
step 60 sanitizer compute-sanitizer --tool memcheck --error-exitcode 9 \
    python3 -m pytest -q -m cuda -p no:cacheprovider tests/kernels/cuda/test_cuda_on_gpu.py \
    tests/kernels/cuda/test_cuda_ops_on_gpu.py -k "Q4_0 or Q6_K-5 or F16-3 or draw or every_other_op or block_of_a_decoder"
step 35 model python3 -c '
import json, sys
from localinfer.bench.decode import BenchSettings
from localinfer.bench.gpu import run_gpu_bench
from localinfer.bench.report import render_gpu
from localinfer.load_options import model_path
record = run_gpu_bench(BenchSettings(model=str(model_path(None)), prompt=512, repetitions=3), lambda *stage: None)
print(json.dumps(record))
print(render_gpu(record))
'
step 25 warm_start python3 -c '
import time
began = time.perf_counter()
import localinfer
with localinfer.load(device="cuda", speculation=None) as llm:
    print("loaded after", time.perf_counter() - began)
    text = llm.complete("Once upon a time", temperature=0, max_tokens=64)
    print("first 64 tokens after", time.perf_counter() - began, text.text)
'
echo "results are in $results"
