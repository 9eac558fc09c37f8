#!/usr/bin/env bash
# Tests on emulated arm64 processors with dot products, without, and with products of matrices: digests of every kernel,
# and logits of ten architectures, a text, a quantized file and an answer of the server that must be those of this x86-64
# machine, bit by bit. Linux; root rights. Not part of the suite: it takes some 25 minutes of two cores. Last results: tests/bench/RESULTS.md.
# usage: tests/arm64.sh ROOT [PYTHON [PROCESSOR...]]
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
wanted=$(cd "$repository" && PATH="$(dirname "$python"):$PATH" bash -euc "$session")
for processor; do
    echo "== $processor"
    on "$processor" "python -m tests.kernels.cpu.stored_digests"
    found=$(on "$processor" "$session")
    [ "$found" = "$wanted" ] || { echo "found:"; echo "$found"; echo "wanted:"; echo "$wanted"; exit 1; } >&2
done
echo "all as on this machine"
