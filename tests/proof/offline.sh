#!/usr/bin/env bash
# Commands of localinfer and every route of its server, offline under strace in a network namespace: prints each address
# that was connected or sent to, and fails for one that is not of this machine. Linux; strace, and rights to make a
# namespace. Not part of the suite: it takes some minutes. Last results: tests/bench/RESULTS.md.
# usage: tests/proof/offline.sh [PYTHON]        (of this machine, with localinfer; default: python3)
set -euo pipefail
if [ -z "${LOCALINFER_PROOF_INSIDE:-}" ]; then
    export LOCALINFER_PROOF_INSIDE=1
    exec unshare --net --pid --fork --kill-child --mount-proc bash "${BASH_SOURCE[0]}" "$(command -v "${1:-python3}")"
fi
ip link set lo up
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
python=$1 folder=$(mktemp -d) demo=models/demo/demo-f16.gguf
trap 'rm -rf "$folder"' EXIT
export XDG_STATE_HOME="$folder/state" PYTHONUNBUFFERED=1

traced() { # traced ARGUMENTS: `localinfer --offline` with them; its end is not looked at, as some want the network
    strace -f -qq -A -o "$folder/calls" -e trace=connect,sendto,sendmsg,sendmmsg "$python" -m localinfer --offline "$@"
}

# Requests to every route, with bodies that each API takes, and pictures by URL among them.
requests='
import json, sys, urllib.error, urllib.request
url, count = sys.argv[1], 0
picture = {"type": "image_url", "image_url": {"url": "http://192.0.2.1/picture.png"}}
asked = [{"role": "user", "content": [{"type": "text", "text": "Hello"}, picture]}]
bodies = [
    {},
    {"messages": asked, "max_tokens": 1},
    {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1, "stream": True},
    {"prompt": "Hello", "input": "Hello", "content": "Hello", "query": "Hello", "documents": ["Hi"], "max_tokens": 1},
]
document = json.load(urllib.request.urlopen(url + "/openapi.json"))
for path, methods in document["paths"].items():
    for method in methods:
        for body in bodies if method == "post" else [None]:
            data = None if body is None else json.dumps(body).encode()
            headers = {"Content-Type": "application/json"}
            path = path.replace("{", "").replace("}", "")
            request = urllib.request.Request(url + path, data, headers, method=method.upper())
            try:
                urllib.request.urlopen(request, timeout=60).read()
            except (urllib.error.HTTPError, TimeoutError):
                pass
            count += 1
print(count, "requests to", len(document["paths"]), "paths")
'

count=0
while read -r line; do
    status=0
    eval "traced $line" <<<"Hello" >/dev/null 2>&1 || status=$?
    echo "status $status: $line"
    count=$((count + 1))
done <<END
run -p Hello -n 2
chat --lines -n 2
pull Qwen/Qwen3-0.6B-GGUF
run -m hf:Qwen/Qwen3-0.6B-GGUF -p Hello
list
show $demo
show --verify $demo
certify $demo -o $folder/demo.cert
quantize $demo $folder/small.gguf --type Q8_0 --method rtn --chunks 0
embed -m $demo Hello
perplexity -m $demo README.md --chunks 1
warmup -m $demo
doctor
doctor --network
sessions list
cache
completion bash
launch codex --print
END
traced serve -m $demo --host 127.0.0.1 --port 18232 --no-socket >"$folder/log" 2>&1 &
for _ in $(seq 300); do
    "$python" -c 'import socket; socket.create_connection(("127.0.0.1", 18232), 1)' 2>/dev/null && break
    sleep 1
done
"$python" -c "$requests" http://127.0.0.1:18232
pkill -TERM -f 'localinfer --offline serve' || true # of this namespace of processes
wait $! || true
echo "$count commands and a server, $(wc -l <"$folder/calls") calls, to:"
grep -oE 'sin6?_addr=[a-z_]+\([^)]*\)|inet_pton\([^)]*\)|sun_path=[^,}]*' "$folder/calls" | sort | uniq -c
! grep -E 'sa_family=AF_INET' "$folder/calls" | grep -vE '"127\.[0-9.]+"|"::1"|"::ffff:127\.[0-9.]+"'
