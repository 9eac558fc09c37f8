#!/bin/sh
# Run other people's clients, unmodified, against a server with the demo model, and print which of them work.
#
#     tests/proof/peers/run_clients.sh [FOLDER] [NAME...]
#
# Each client is installed from PyPI or npm into a place of its own in FOLDER (default: build/clients), where it stays
# for the next run; all of them take 3 GB. NAME: only these. NEWEST=1: bring them to their newest releases first. RESULT:
# a file for the table of a run of all, such as tests/proof/peers/CLIENTS.md. PYTHON: the interpreter that has localinfer
# (default: python). URL: of a server that runs already. Exits with 1 if a client failed.
set -u
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-build/clients}
[ $# -gt 0 ] && shift
PYTHON=${PYTHON:-python}
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

install() { # language, place, packages
    language=$1 place=$2
    shift 2
    [ -e "$place/installed" ] && [ -z "${NEWEST:-}" ] && return 0
    rm -f "$place/installed"
    if [ "$language" = py ]; then
        [ -e "$place/bin/python" ] || "$PYTHON" -m venv --without-pip "$place" || return 1
        "$PYTHON" -m pip --python "$place/bin/python" install -q -U --disable-pip-version-check "$@" || return 1
    else
        mkdir -p "$place" && (cd "$place" && npm init -y && npm install --no-fund --no-audit $(printf '%s@latest ' "$@")) ||
            return 1
    fi
    touch "$place/installed"
}

version() { # language, place, package
    if [ "$1" = py ]; then
        "$2/bin/python" -c "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))" "${3%%\[*}"
    else
        node -p 'JSON.parse(require("fs").readFileSync(process.argv[1])).version' "$2/node_modules/$3/package.json"
    fi
}

use() { # place, file
    case $2 in
        *.py) "$1/bin/python" "$here/clients/$2" ;;
        *.sh) BIN=$1/bin sh "$here/clients/$2" ;;
        # Node looks for packages beside the file.
        *.mjs) cp "$here/clients/$2" "$1/$2" && node "$1/$2" ;;
    esac
}

if [ -z "${URL:-}" ]; then
    private=$(mktemp -d)
    : > "$folder/server.out"
    "$PYTHON" -m localinfer serve --port 0 --socket "$private/s.sock" --no-disk-cache --no-config \
        > "$folder/server.out" 2> "$folder/server.log" &
    server=$!
    trap 'kill $server; wait $server; rm -rf "$private"' EXIT
    until grep -q ^serving "$folder/server.out"; do
        kill -0 $server 2> /dev/null || { cat "$folder/server.log"; exit 2; }
        sleep 0.2
    done
    URL=$(sed 's/.*\(http:[^ ]*\).*/\1/' "$folder/server.out")
fi
# Without it clients would ask their makers' servers.
export URL="${URL:?the server has told no address}"

failed=0
table=$folder/table.md
: > "$table"
say() { printf "$@" | tee -a "$table"; }
say '| %-14s | %-10s | %-6s |\n|---|---|---|\n' client version result
while read -r name language file packages; do
    case " $* " in "  " | *" $name "*) ;; *) continue ;; esac
    place=$folder/$name
    # shellcheck disable=SC2086 # Packages are words.
    if ! install "$language" "$place" $packages > "$folder/$name.log" 2>&1; then
        result='no install'
    elif use "$place" "$file" >> "$folder/$name.log" 2>&1 < /dev/null; then
        result=pass
    else
        result=FAIL
    fi
    [ "$result" = pass ] || failed=1
    say '| %-14s | %-10s | %-6s |\n' "$name" "$(version "$language" "$place" "${packages%% *}" 2> /dev/null)" "$result"
    [ "$result" = pass ] || tail -5 "$folder/$name.log" | sed 's/^/    /'
done <<'CLIENTS'
openai py use_openai.py openai pydantic
anthropic py use_anthropic.py anthropic
openai-npm js use_openai.mjs openai
anthropic-npm js use_anthropic.mjs @anthropic-ai/sdk
ai-sdk js use_ai_sdk.mjs ai @ai-sdk/openai-compatible zod
langchain py use_langchain.py langchain-openai langchain-anthropic
llama-index py use_llama_index.py llama-index-llms-openai-like llama-index-embeddings-openai-like
litellm py use_litellm.py litellm mcp
instructor py use_instructor.py instructor
pydantic-ai py use_pydantic_ai.py pydantic-ai-slim[openai,anthropic]
smolagents py use_smolagents.py smolagents[openai]
openai-agents py use_openai_agents.py openai-agents
outlines py use_outlines.py outlines openai
guidance py use_guidance.py guidance openai
llm py use_llm.sh llm
ollama py use_ollama.py ollama
ollama-npm js use_ollama.mjs ollama
lm-eval py use_lm_eval.sh lm-eval[api]
aider py use_aider.sh aider-chat
CLIENTS
if [ -n "${RESULT:-}" ]; then
    {
        printf '# The newest releases of other people'"'"'s clients\n\n'
        printf 'Written by `NEWEST=1 RESULT=tests/proof/peers/CLIENTS.md tests/proof/peers/run_clients.sh` on %s, against localinfer %s.\n\n' \
            "$(date -u +%Y-%m-%d)" "$("$PYTHON" -c 'import importlib.metadata as m; print(m.version("localinfer"))')"
        cat "$table"
    } > "$RESULT"
fi
exit $failed
