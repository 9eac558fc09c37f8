# llm, the command: a prompt, a stream, a schema, a tool, a chat that goes on, and embeddings.
set -eu
export LLM_USER_PATH=$(mktemp -d)
trap 'rm -rf "$LLM_USER_PATH"' EXIT
cat > "$LLM_USER_PATH/extra-openai-models.yaml" <<LINES
- model_id: local
  model_name: demo
  api_base: $URL/v1
  api_key_name: local
  supports_tools: true
  supports_schema: true
LINES
cat > "$LLM_USER_PATH/keys.json" <<'LINES'
{"local": "none"}
LINES
llm="$BIN/llm"
schema='{"type": "object", "properties": {"is_cat": {"type": "boolean"}}, "required": ["is_cat"]}'
test -n "$("$llm" -m local --no-stream -o max_tokens 20 'Tell me a story.')"
test -n "$("$llm" -m local -o max_tokens 20 'Tell me a story.')"
test -n "$("$llm" -m local -c -o max_tokens 20 'Go on.')"
"$llm" -m local -o max_tokens 80 --schema "$schema" 'A pet?' | "$BIN/python" -c \
    'import json, sys; assert json.load(sys.stdin)["is_cat"] in (True, False)'
"$llm" -m local -o max_tokens 20 --functions 'def add(a: int, b: int) -> int: return a + b' 'Tell me a story.' > /dev/null
