#!/usr/bin/env bash
# Everything that only a GPU can show, in steps of under eight minutes, without a network. In the repository's root:
#
#   bash tests/bench/cuda_first_run.sh                    which steps there are, in the order in which they are worth most
#   bash tests/bench/cuda_first_run.sh imports product    these
#   bash tests/bench/cuda_first_run.sh all                all
#   bash tests/bench/cuda_first_run.sh --dry-run          all, without a GPU, on a device that records (or some, if named)
#
# .cuda, which git ignores, stays between calls: .cuda/cache has compiled kernels, .cuda/results every figure and log,
# which are copied to the folder $OUT after each step, if that is set. What python3 lacks is taken from
# .cuda/packages.tar.xz or from wheels in .cuda/wheels, and the models that the tests compare from .cuda/shared (a copy
# of ../shared), if these exist. How to pack them small: README.md.
set -euo pipefail
umask 077
mkdir -p .cuda/cache .cuda/state .cuda/results .cuda/site
base="$PWD/.cuda"
export PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HYPOTHESIS_STORAGE_DIRECTORY="$base/cache/hypothesis"
export XDG_CACHE_HOME="$base/cache" XDG_STATE_HOME="$base/state"
# The driver's machine code of kernels.
export CUDA_CACHE_PATH="$base/cache/driver" CUDA_CACHE_MAXSIZE=2147483648

if [ -f .cuda/packages.tar.xz ] && [ ! -d .cuda/installed ]; then
    mkdir .cuda/installed
    tar -xJf .cuda/packages.tar.xz -C .cuda/installed
fi
if compgen -G ".cuda/wheels/*.whl" >/dev/null && [ ! -d .cuda/installed ]; then
    python3 -m pip install -q --no-index --no-deps --no-compile --target .cuda/installed .cuda/wheels/*.whl
fi
# The package under its real name, as an installed copy has it.
rm -rf .cuda/site/localinfer
mkdir -p .cuda/site/localinfer
cp -R localinfer/. kernels models quant .cuda/site/localinfer/
export PYTHONPATH="$base/site:$base/installed"
if [ -d .cuda/shared ] && [ ! -e ../shared ]; then cp -R .cuda/shared ../shared; fi

exec python3 -m tests.bench.cuda_steps "$@"
