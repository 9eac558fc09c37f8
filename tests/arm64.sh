#!/usr/bin/env bash
# Tests on emulated arm64 processors with dot products, without, and with products of matrices: digests of every kernel,
# and logits of ten architectures, a text, a quantized file and an answer of the server that must be those of this x86-64
# machine, bit by bit. Certificates of models that one of them wrote must hold on all, with every instruction set of this
# machine, and find a planted fault. Linux; root rights. Not part of the suite: it takes some 30 minutes of two cores. Last
# results: tests/bench/RESULTS.md.
# usage: [CERTIFIED=FILE.gguf] [ONLY=certificates] tests/arm64.sh ROOT [PYTHON [PROCESSOR...]]
#   CERTIFIED: a further model to certify and verify everywhere; emulation computes some five of 135 M weights a second
#   ROOT: an arm64 Debian with Python, in which `chroot` runs programs (qemu-user-static, registered by binfmt_misc)
#   PYTHON: of this machine, with localinfer (default: python3)
#   PROCESSOR: by its name in qemu (default: neoverse-n1 cortex-a72 max)
set -euo pipefail
root=$(realpath "$1") python=$(command -v "${2:-python3}")
shift "$(($# < 2 ? $# : 2))"
[ $# -gt 0 ] || set -- neoverse-n1 cortex-a72 max
repository="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
source=localinfer-source venv=/localinfer-venv
[ "$(chroot "$root" uname -m)" = aarch64 ] || { echo "$root runs no arm64 programs: register qemu-user" >&2; exit 1; }

# Digests of logits, a text, the digest of a quantized file, and an answer of a server.
session='
python -m tests.models.fixture_digests
scratch=$(mktemp -d); trap "rm -rf $scratch" EXIT
python -m localinfer run -p "Once upon a time" -n 60 --seed 1 2>/dev/null
python -m localinfer quantize models/demo/demo-f16.gguf "$scratch/small.gguf" --type Q4_K_M --method rtn --chunks 0 2>/dev/null >&2
sha256sum <"$scratch/small.gguf"
python -m localinfer serve --host 127.0.0.1 --port 18231 --no-socket --no-disk-cache >"$scratch/log" 2>&1 &
server=$!
python - <<END
import json, time, urllib.request
body = json.dumps({"prompt": "The little dog", "max_tokens": 20, "temperature": 0}).encode()
headers = {"Content-Type": "application/json"}
for _ in range(600):
    try:
        request = urllib.request.Request("http://127.0.0.1:18231/v1/completions", body, headers)
        print(json.load(urllib.request.urlopen(request))["choices"][0]["text"])
        break
    except OSError:
        time.sleep(1)
END
kill -TERM $server; wait $server
'

# Two whole models and a copy of one with a fault.
models='
from pathlib import Path
from shutil import copy
from sys import argv
from localinfer.models.demo import __path__ as demo
from tests.models.checks.editable_model import EditableModel, base_model
from tests.models.checks.planted_faults import Q4_0, plant
folder = Path(argv[1])
(folder / "planted").mkdir(parents=True)
copy(Path(demo[0]) / "demo-f16.gguf", folder)
EditableModel.read(base_model(Q4_0)).write(folder / "whole.gguf")
plant("bit flips in scales", folder).rename(folder / "planted" / "fault.gguf")
'
# certify NAME, verify: of all models in a folder, and with all certificates in it.
certificates='
certify() {
    for model in *.gguf; do
        python -m localinfer certify "$model" -o "${model%.gguf}.$1.cert" >/dev/null 2>&1
    done
}
verify() {
    for certificate in *.cert; do
        report=$(python -m localinfer show --verify "${certificate%.*.cert}.gguf" --certificate "$certificate" 2>&1) ||
            { echo "$certificate: $report" >&2; exit 1; }
    done
    report=$(python -m localinfer show --verify planted/fault.gguf --certificate "$(ls whole.*.cert | head -1)" 2>&1) && exit 1
    grep "certificate: .*tensor" <<<"$report"
}
'

on() { # on PROCESSOR COMMANDS: as on this processor, by its name in qemu, with its own compiled kernels
    env -i PATH=$venv/bin:/usr/bin:/bin:/usr/sbin HOME=/root LANG=C.UTF-8 QEMU_CPU="$1" XDG_CACHE_HOME="/root/cache-$1" \
        $(env | grep ^PIP_ || true) chroot "$root" bash -euc "cd /$source && $2"
}

rm -rf "${root:?}/$source"
mkdir "$root/$source"
git -C "$repository" ls-files -z | tar -C "$repository" --null -T - -c | tar -C "$root/$source" -x
if [ ! -x "$root$venv/bin/localinfer" ]; then
    on neoverse-n1 "python3 -m venv $venv && pip install --quiet -e '.[cli,server]'"
fi
path="$(dirname "$python"):$PATH"
# Models and certificates, where both find them.
folder="$root/localinfer-models"
rm -rf "$folder"
cd "$repository"
"$python" -c "$models" "$folder"
[ -z "${CERTIFIED:-}" ] || cp "$CERTIFIED" "$folder"
here() { # here INSTRUCTIONS COMMANDS: in that folder, with these kernels
    (cd "$folder" && PATH="$path" LOCALINFER_ISA="$1" bash -euc "$certificates $2")
}
sets=$("$python" -c "from localinfer.kernels.jit.isa import available; print(*(one.value for one in available()))")
for instructions in $sets; do
    here "$instructions" "certify $instructions"
done
for instructions in $sets; do
    echo "== $instructions: certificates by $sets"
    here "$instructions" verify
done
[ "${ONLY:-}" = certificates ] || wanted=$(PATH="$path" bash -euc "$session")
for processor; do
    echo "== $processor"
    on "$processor" "cd /localinfer-models; $certificates certify $processor; verify"
    [ "${ONLY:-}" = certificates ] && continue
    on "$processor" "python -m tests.kernels.cpu.stored_digests"
    found=$(on "$processor" "$session")
    [ "$found" = "$wanted" ] || { echo "found:"; echo "$found"; echo "wanted:"; echo "$wanted"; exit 1; } >&2
done
here "${sets%% *}" verify
echo "all as on this machine"
