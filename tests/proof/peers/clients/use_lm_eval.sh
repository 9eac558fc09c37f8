# lm-evaluation-harness, local-completions: likelihoods and generated text of a task that lies beside the script.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/pets.jsonl" <<'LINES'
{"question": "Once upon a time, there was a little", "choices": [" girl", " xylophone"], "answer": 0}
{"question": "Tom and Lily went to the", "choices": [" qqqq", " park"], "answer": 1}
LINES
cat > "$folder/pets.yaml" <<LINES
task: pets
dataset_path: json
dataset_kwargs: {data_files: {test: $folder/pets.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
LINES
cat > "$folder/tales.yaml" <<LINES
task: tales
dataset_path: json
dataset_kwargs: {data_files: {test: $folder/pets.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: question
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match}]
LINES
export HF_HOME="$folder/hf" HF_DATASETS_OFFLINE=1 HF_HUB_OFFLINE=1
arguments="model=demo,base_url=$URL/v1/completions,num_concurrent=1,max_retries=1,tokenizer_backend=remote,tokenized_requests=False"
"$BIN/lm_eval" run --model local-completions --model_args "$arguments" --include_path "$folder" --tasks pets,tales \
    --output_path "$folder/out" > "$folder/log" 2>&1 || { tail -20 "$folder/log"; exit 1; }
"$BIN/python" - "$folder" <<'CHECK'
import glob, json, sys

(found,) = glob.glob(f"{sys.argv[1]}/out/**/*.json", recursive=True)
results = json.load(open(found))["results"]
assert results["pets"]["acc,none"] == 1.0, results
assert "exact_match,none" in results["tales"], results
CHECK
