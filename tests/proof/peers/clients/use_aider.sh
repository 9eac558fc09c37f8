# aider: a request about a file that is read and may be changed, and answers that are no edits.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
export HOME="$folder" OPENAI_API_BASE="$URL/v1" OPENAI_API_KEY=none
printf 'print("hello")\n' > hello.py
cat > settings.yml <<'LINES'
- name: openai/demo
  edit_format: ask
  use_repo_map: false
  extra_params: {max_tokens: 40}
LINES
cat > metadata.json <<'LINES'
{"openai/demo": {"max_input_tokens": 4096, "max_output_tokens": 40, "litellm_provider": "openai", "mode": "chat"}}
LINES
for stream in --stream --no-stream; do
    "$BIN/aider" --model openai/demo --model-settings-file settings.yml --model-metadata-file metadata.json \
        --no-git --yes-always --no-check-update --analytics-disable --no-show-release-notes --no-pretty $stream \
        --no-gitignore --map-tokens 0 --message 'What is this?' hello.py > log 2>&1 || { tail -20 log; exit 1; }
    ! grep -iE 'litellm\..*Error|APIError|BadRequest|Traceback' log
done
