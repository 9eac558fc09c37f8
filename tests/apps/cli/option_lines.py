"""Lines with every option of every command: values that are taken, and values that are refused."""

TOGETHER = {
    "{yarn}": """--context-length 2048 --rope-scaling yarn --rope-scale 2 --rope-base 20000 --yarn-original-context 1024
        --yarn-extrapolation-factor 1 --yarn-attention-factor 1 --yarn-beta-fast 9 --yarn-beta-slow 1""",
    "{quick}": "--type q4_0 --chunks 0",
    "{linear}": "--context-length 2048 --rope-scaling linear --rope-frequency-scale 0.5",
    "{limits}": """--requests-per-minute 5 --tokens-per-minute 500 --running-per-token 2 --queued-per-token 0
        --min-priority -3 --ttft-objective 1.5""",
    "{logged}": """--log-format json --otlp-endpoint http://localhost:1 --log-requests {folder}/requests.jsonl
        --log-requests-size 2MB""",
    "{events}": "--kv-events tcp://127.0.0.1:* --kv-events-replay-endpoint ipc://{folder}/replay",
    "{other}": "--no-verify --cpu-moe --chat-template-kwargs template_date=today",
    "{slots}": "--tensor-split 3,1 --parallel 2 --slot-save-path {folder} --no-slots --no-metrics",
    "{shift}": "--context-shift --pooling last",
    "{decode}": "--role decode --prefill-server http://localhost:9",
    "{filters}": """--temperature 0.5 --top-k 5 --top-p 0.5 --min-p 0.1 --typical-p 0.9 --top-n-sigma 1 --seed 1
        --xtc-probability 0.5 --xtc-threshold 0.2 --dynatemp-range 0.1 --dynatemp-exponent 2""",
    "{penalties}": """--mirostat 2 --mirostat-tau 4 --mirostat-eta 0.2 --repetition-penalty 1.1 --repetition-last-n -1
        --frequency-penalty 0.1 --presence-penalty -0.1 --dry-multiplier 1 --dry-base 2 --dry-allowed-length 1
        --dry-last-n 5 --dry-sequence-breaker . --logit-bias 5=-inf""",
}
"""Options that one model can have at once: loading it is what takes time here."""

GOOD = {
    "run": """
        {hi} --chat-template {template} --set llama.rope.freq_base=20000 --stop x --ignore-eos --context-shift --stats
        {hi} {yarn} {filters}
        {hi} {linear} {penalties}
        -p Hi -n 1 --model {demo} --device cpu --gpu-layers 0 --threads 1 --context-length 64 --no-disk-cache --json
        --no-config --prompt Hi --max-tokens 1 --disk-cache-size 1MB --disk-cache-folder {folder} --json-schema {schema}
        {hi} --kv-window 256 --kv-type q8_0/f16 --kv-memory 64MB --grammar {grammar} --n-cpu-moe 1 --tensor-split 3,1
        {hi} --speculation draft --draft {demo} --regex a+ --mmproj off
        {hi} --model {mtp} --speculation mtp --threads 1 --measure-again
        {hi} --beams 2 --raw --ignore-model-sampling --no-verify --cpu-moe --chat-template-kwargs a=b
    """,
    "chat": """
        {one} --chat-template {template} --set llama.rope.freq_base=20000 --system Brief. --context-shift --stats
        {one} {yarn} {filters}
        {one} {linear} {penalties}
        --lines -n 1 --no-disk-cache --model {demo} --device cpu --gpu-layers 0 --threads 1 --no-config --cpu-moe
        --context-length 64 --lines --max-tokens 1 --kv-type q8_0/f16 --kv-memory 64MB
        --lines -n 1 --disk-cache-size 1MB --disk-cache-folder {folder}
        {one} --json
        {one} --json-schema {schema}
        {one} --grammar {grammar}
        {brief} --prompt Hi --file {file} --show-reasoning --regex ab
        {brief} --stats --session dogs
        {one} --kv-window 256 --n-cpu-moe 1 --tensor-split 3,1
        {one} --speculation draft --draft {demo} --mmproj auto
        {one} --model {mtp} --speculation mtp --threads 1 --measure-again
        {one} --continue
        {one} --session dogs
        -n 1 --no-history --lines --ignore-model-sampling --no-verify --chat-template-kwargs template_date=2026-10-01
    """,
    "show": """
        {demo} --tensors
        {demo} --json
        {demo} --ops
        {demo} --verify --certificate {cert}
    """,
    "tokenize": """
        --model {demo} Hi --ids --no-special --parse-special --no-config
    """,
    "bench": """
        {demo} --prompt 4 --decode 2 --context 4 --repetitions 1 --threads 1 --device cpu --json --stream
        {demo} --prompt 4 --decode 2 --repetitions 1 --speculation --draft {demo}
        {mtp} --decode 2 --repetitions 1 --threads 1 --speculation
    """,
    "cache": """
        --disk-cache-folder {folder} --clear --typed-lines --responses
    """,
    "sessions": """
        --json
        show kept
        rename kept other
        delete kept
        export kept --output {folder}/x.json
        export kept -o {folder}/x --format markdown
    """,
    "launch": """
        codex --print --model {demo} --context-length 4096 --port 9 --serve-options --verbose
        pi --restore
        zed --print -m {demo} --port 9 -- --wait
    """,
    "pull": """
        org/repo
    """,
    "list": """
        --all
        --json
        --architectures --json
    """,
    "rm": "",
    "warmup": """
        --model {demo} --device cpu --kv-type q8_0/f16 --kv-window 256
        --draft {demo} --no-config
    """,
    "doctor": """
        --json
        --network --json
    """,
    "quantize": """
        {demo} {folder}/1.gguf --type q8_0 --method rtn --threads 1 --device cpu --text {text} --chunks 1
        {tiny} {folder}/2.gguf --calibration {text} --calibration-tokens 512 --save-imatrix {folder}/i.gguf {quick}
        {tiny} {folder}/3.gguf --imatrix {folder}/i.gguf {quick}
        {tiny} {folder}/4.gguf --type F16 --chunks 0 --no-config
        {tiny} {folder}/5.gguf --type mxfp4_moe --calibration-tokens 512 --chunks 0
    """,
    "compare": """
        {demo} {demo} {text} --context-length 64 --chunks 1 --threads 1 --json
        {demo} {demo} --chunks 1 --questions --no-config
    """,
    "perplexity": """
        {demo} {text} --context-length 64 --chunks 1 --threads 1 --json --no-config
    """,
    "embed": """
        {demo} Hi --pooling mean --dimensions 8 --no-normalize --truncate --context-length 64 --threads 1
        {demo} Hi --device cpu
        {demo} --file {text} --truncate --output {folder}/x.npy --no-config
    """,
    "certify": """
        {demo} --output {folder}/demo.cert
    """,
    "decide": """
        {demo} Hi --ask How? --option a --option b --orders 2 --threads 1
        {demo} Hi --ask How? --level a --level b --context-length 256 --device cpu --output {folder}/x.jsonl
        {demo} --questions {asked} --file {text} --no-config
        {demo} --questions {asked} --examples {labelled} --method isotonic --fit {folder}/fit.json
        {demo} Hi --questions {asked} --calibration {fitted}
    """,
    "rerank": """
        {ranker} Hi one two --top-n 1 --no-normalize --truncate --context-length 64 --threads 1 --json
        {ranker} Hi one --device cpu
        {ranker} Hi --file {text} --truncate --no-config
    """,
    "mcp": """
        --no-disk-cache --chat-template {template} {yarn}
        --no-disk-cache {linear} --set llama.rope.freq_base=20000 --no-config --ignore-model-sampling --no-verify
        --no-disk-cache --chat-template-kwargs template_date=today
        --model {demo} --device cpu --gpu-layers 0 --threads 1 --no-disk-cache --context-length 512 --cpu-moe
        --kv-type q8_0/f16 --kv-memory 64MB --disk-cache-size 1MB --disk-cache-folder {folder}
        --kv-window 256 --no-disk-cache --n-cpu-moe 1 --tensor-split 3,1
        --speculation draft --draft {demo} --no-disk-cache --mmproj off
        --model {mtp} --speculation mtp --threads 1 --measure-again --no-disk-cache
    """,
    "serve": """
        {local} --chat-template {template} {yarn} {limits}
        {local} {filters} --max-tokens 5 --reasoning on --reasoning-budget 9 --alias a,b --ignore-model-sampling {other}
        --no-tcp --socket {sock} --no-disk-cache {penalties} --chat-template-file {template} {logged}
        --port 0 --no-socket --no-page --api-key key --compact --no-loop-stop
        {local} {linear} --set llama.rope.freq_base=20000 {events} --kv-events-topic kv
        --model {demo} --device cpu --gpu-layers 0 --threads 1 --no-disk-cache --no-config --port 0 --socket {sock}
        --kv-type q8_0/f16 --kv-memory 64MB --disk-cache-size 1MB --disk-cache-folder {folder} --port 0 --socket {sock}
        --kv-window 256 --no-tcp --context-length 512 --socket {sock} --move-volatile-head --n-cpu-moe 1 {slots}
        --speculation draft --draft {demo} --no-tcp --socket {sock} --mmproj off --allow-media-urls
        --model {mtp} --speculation mtp --threads 1 --measure-again --no-disk-cache --no-tcp --socket {sock}
        --models {models} --host 127.0.0.1 --port 0 --socket {sock} --token-file {keys} --allow-host x --strict-model
        --models {models} --port 0 --socket {sock} --token-file {keys} --isolate-cache
        --allow-origin http://a.example --allow-private-network --port 0 --socket {sock} --idle-unload 5 --verbose
        --memory-limit 1GB --max-generations 2 --shutdown-seconds 1 --until-stdin-ends --no-tcp --socket {sock} {shift}
        --models {models} --token-env TOKEN_OF_THIS_TEST --ready-json --port 0 --socket {sock}
        --pulled --models {models} --models-config {settings} --load-wait 1 --no-tcp --socket {sock}
        {local} --no-store --kv-events tcp://127.0.0.1:9 --kv-events-connect --kv-events-allow-remote
        --disk-cache-folder {folder} --store-size 0 --store-days 0.5 --no-tcp --socket {sock}
        --role prefill --disk-cache-folder {folder} --no-tcp --socket {sock}
        {decode} --prefill-server unix:/no --prefill-deadline 5 --disk-cache-folder {folder} --no-tcp --socket {sock}
        {decode} --prefill-threshold 9 --prefill-token-file {keys} --disk-cache-folder {folder} --no-tcp --socket {sock}
        {local} --kv-events ipc://{folder}/kv --kv-events-buffer-steps 5 --kv-events-encoding array
    """,
}
"""Lines of words; each option of a command must stand in one."""

BAD = {
    "*": """
        --no-config=maybe
        --model no-such-file
        --device tpu
        --device cuda:x
        --gpu-layers -1
        --tensor-split 0,0
        --cpu-moe=maybe
        --cpu-moe --n-cpu-moe 1
        --n-cpu-moe -1
        --threads 0
        --context-length 0
        --kv-type q9
        --kv-memory 1TT
        --kv-window 0
        --disk-cache-size none
        --speculation always
        --speculation mtp
        --speculation mtp --draft {demo}
        --draft no-such-file
        --mmproj no-such-file
        --no-disk-cache=maybe
        --measure-again=maybe
        --chat-template no-such-file
        --chat-template {broken}
        --chat-template-kwargs date
        --chat-template-kwargs =x
        --chat-template-kwargs {{
        --chat-template-kwargs template_date=soon
        --chat-template-kwargs messages=1
        --rope-scaling magic
        --rope-scale 0
        --rope-base -1
        --rope-frequency-scale x
        --yarn-original-context 0
        --yarn-extrapolation-factor -1
        --yarn-attention-factor 0
        --yarn-beta-fast 0
        --yarn-beta-slow nan
        --set llama.rope.freq_base
        --set llama.rope.freq_base=banana
        --set llama.no_such_key=1
        --ignore-model-sampling=maybe
        --no-verify=maybe
    """,
    "sampling": """
        --temperature -1
        --top-k -1
        --top-p 2
        --min-p x
        --repetition-penalty 0
        --typical-p 7
        --top-n-sigma -2
        --xtc-probability 3
        --xtc-threshold 3
        --dynatemp-range -1
        --dynatemp-exponent -1
        --mirostat 5
        --mirostat-tau -1
        --mirostat-eta 2
        --repetition-last-n -2
        --frequency-penalty many
        --presence-penalty many
        --dry-multiplier -1
        --dry-base 0
        --dry-allowed-length 0
        --dry-last-n -2
        --dry-sequence-breaker \udcff
        --logit-bias 5
        --seed -1
        --max-tokens 0
    """,
    "texts": """
        --context-shift=maybe
        --stats=maybe
    """,
    "run": """
        --prompt \udcff
        --json=maybe
        --json-schema no-such-file
        --grammar no-such-file
        --regex (
        --beams 0
        --stop \udcff
        --raw=maybe
        --ignore-eos=maybe
    """,
    "chat": """
        --system \udcff
        --prompt \udcff
        --file no-such-file
        -p Hi --image no-such-file
        -p Hi --audio no-such-file
        --show-reasoning=maybe
        --lines --prompt Hi
        --json=maybe
        --json-schema no-such-file
        --grammar no-such-file
        --regex (
        --session \udcff
        --session no/such/-session --no-history
        -p Hi --mcp no-such-file
        -p Hi --mcp-allow look
        --continue --session x
        --continue=maybe
        --no-history=maybe
    """,
    "show": """
        {demo} --tensors=maybe
        {demo} --ops=maybe
        {demo} --verify=maybe
        {demo} --certificate no-such-file
        {demo} --json=maybe
        no-such-file
    """,
    "tokenize": """
        --model no-such-file Hi
        Hi --no-config=maybe
        Hi --ids=maybe
        Hi --no-special=maybe
        Hi --parse-special=maybe
    """,
    "bench": """
        {demo} --prompt 0
        {demo} --decode 0
        {demo} --context 0
        {demo} --repetitions 0
        {demo} --threads 0
        {demo} --device tpu
        {demo} --compare other
        {demo} --compare llama-cpp-python --peer-python no-such-file
        {demo} --stream=maybe
        {demo} --speculation=maybe
        {demo} --speculation --draft no-such-file
        {demo} --roofline=maybe
        {demo} --serve=maybe
        {demo} --serve --concurrency 0
        {demo} --serve --requests 0
        {demo} --serve --slo-ttft 0
        {demo} --serve --slo-itl 0
        {demo} --output x.png
        {demo} --json=maybe
        no-such-file
    """,
    "cache": """
        --clear=maybe
        --clear --typed-lines=maybe
        --typed-lines
        --clear --responses=maybe
        --responses
    """,
    "sessions": """
        --json=maybe
        show no-such-session
        rename no-such-session other
        rename kept \udcff
        delete no-such-session
        export no-such-session -o {folder}/x
        export kept --output {folder}
        export kept --output {folder}/x --format pdf
        --json show kept
    """,
    "launch": """
        nobody
        codex --print --model no-such-file --port 9
        codex --print --context-length 0
        codex --port 0
        codex --print --port 9 --serve-options "
        codex --print=maybe
        codex --restore=maybe
    """,
    "pull": """
        no-such-file
        --no-mmproj no-such-file
    """,
    "list": """
        --all=maybe
        --json=maybe
        --architectures --all
    """,
    "rm": """
        no-such-file
    """,
    "warmup": """
        --packs {file}
        --packs {file}/x
        --model no-such-file
        --device tpu
        --kv-type q9
        --kv-window 0
        --draft no-such-file
        --mmproj no-such-file
        --no-config=maybe
    """,
    "doctor": """
        --json=maybe
        --network=maybe
    """,
    "quantize": """
        {demo} {folder}/x.gguf --type q99
        {demo} {folder}/x.gguf --method magic
        {demo} {folder}/x.gguf --type BF16 --method gptq
        {demo} {folder}/x.gguf --type F16 --imatrix {file}
        {demo} {folder}/x.gguf --calibration no-such-file
        {demo} {folder}/x.gguf --calibration-tokens 0
        {demo} {folder}/x.gguf --imatrix no-such-file
        {demo} {folder}/x.gguf --save-imatrix {file}/i.gguf
        {demo} {folder}/x.gguf --threads 0
        {demo} {folder}/x.gguf --device tpu
        {demo} {folder}/x.gguf --text no-such-file
        {demo} {folder}/x.gguf --text {text} --chunks -1
        {demo} {folder}/x.gguf --no-config=maybe
        no-such-file {folder}/x.gguf
        {demo} {file}/x.gguf
    """,
    "compare": """
        {demo} {demo} {text} --context-length 0
        {demo} {demo} {text} --chunks 0
        {demo} {demo} {text} --threads 0
        {demo} {demo} {text} --json=maybe
        {demo} {demo} {text} --questions=maybe
        {demo} {demo} no-such-file
        {demo} {demo} {text} --no-config=maybe
        {demo} no-such-file {text}
        {demo} {demo} --image no-such-file
        {demo} {demo} {text} --image {text}
        {demo} {demo} --mmproj {demo}
        {demo} {demo} --candidate-mmproj {demo}
    """,
    "perplexity": """
        {demo} {text} --context-length 0
        {demo} {text} --chunks 0
        {demo} {text} --threads 0
        {demo} {text} --json=maybe
        {demo} {text} --no-config=maybe
        {demo} no-such-file
        no-such-file {text}
    """,
    "embed": """
        {demo} Hi --pooling rank
        {demo} Hi --dimensions 0
        {demo} --file no-such-file
        {demo} Hi --truncate=maybe
        {demo} Hi --no-normalize=maybe
        {demo} Hi --context-length 0
        {demo} Hi --device tpu
        {demo} Hi --threads 0
        {demo} Hi --output {file}/x.npy
        {demo} Hi --no-config=maybe
        no-such-file Hi
    """,
    "certify": """
        {demo} --output {file}/x
        no-such-file --output {folder}/x
    """,
    "decide": """
        {demo} Hi
        {demo} Hi --ask How? --option a
        {demo} Hi --ask How? --level a
        {demo} Hi --ask How? --orders 0
        {demo} Hi --questions no-such-file
        {demo} --questions {asked} --file no-such-file
        {demo} --questions {asked} --examples no-such-file
        {demo} --questions {asked} --examples {labelled} --method platt
        {demo} Hi --questions {asked} --fit {folder}/fit.json
        {demo} Hi --questions {asked} --calibration no-such-file
        {demo} Hi --ask How? --output {file}/x.jsonl
        {demo} Hi --ask How? --context-length 0
        {demo} Hi --ask How? --device tpu
        {demo} Hi --ask How? --threads 0
        {demo} Hi --ask How? --no-config=maybe
        no-such-file Hi --ask How?
    """,
    "rerank": """
        {ranker} Hi one --top-n 0
        {ranker} Hi --file no-such-file
        {ranker} Hi one --truncate=maybe
        {ranker} Hi one --no-normalize=maybe
        {ranker} Hi one --context-length 0
        {ranker} Hi one --device tpu
        {ranker} Hi one --threads 0
        {ranker} Hi one --json=maybe
        {ranker} Hi one --no-config=maybe
        no-such-file Hi one
    """,
    "serve": """
        --models no-such-folder
        --pulled=maybe
        --models-config no-such-file
        --load-wait -1
        --host 256.0.0.1
        --reasoning maybe
        --reasoning-budget -2
        --alias a,,b
        --chat-template-file no-such-file
        --chat-template-file {template} --chat-template {template}
        --api-key \u00e9
        --api-key a --token-env TOKEN_OF_THIS_TEST
        --no-socket=maybe
        --no-socket --socket {sock}
        --no-page=maybe
        --no-loop-stop=maybe
        --port 65536
        --no-tcp=maybe
        --socket {file}/s.sock
        --token-file no-such-file
        --token-env NO_SUCH_VARIABLE
        --allow-host \udcff
        --allow-origin \udcff
        --allow-private-network=maybe
        --allow-media-urls=maybe
        --isolate-cache=maybe
        --port 0 --no-socket --isolate-cache
        --strict-model=maybe
        --move-volatile-head=maybe
        --compact=maybe
        --idle-unload -1
        --memory-limit none
        --max-generations 0
        --shutdown-seconds -1
        --parallel 0
        --slot-save-path no-such-folder
        --no-slots=maybe
        --no-metrics=maybe
        --context-shift=maybe
        --pooling most
        --until-stdin-ends=maybe
        --ready-json=maybe
        --role router
        --role decode
        --role prefill --no-disk-cache
        --role prefill --kv-window 256
        --role prefill --prefill-server http://localhost:9
        --role decode --prefill-server localhost
        --prefill-threshold 9
        {decode} --prefill-threshold 0
        {decode} --prefill-deadline 0
        {decode} --prefill-token-file no-such-file
        --requests-per-minute 0
        --running-per-token 0
        --queued-per-token -1
        --min-priority high
        --ttft-objective -1
        --tokens-per-minute none
        --log-format yaml
        --log-requests {folder}
        --log-requests {folder}/x --log-requests-size 5
        --log-requests-size 1GB
        --otlp-endpoint nowhere
        --verbose=maybe
        --no-store=maybe
        --store-size none
        --store-days -1
        --kv-events nowhere
        --kv-events tcp://0.0.0.0:5557
        --kv-events tcp://127.0.0.1:* --kv-events-connect
        --kv-events tcp://127.0.0.1:* --kv-events-replay-endpoint tcp://*:5558
        --kv-events-topic kv
        --kv-events tcp://127.0.0.1:* --kv-events-buffer-steps 0
        --kv-events tcp://127.0.0.1:* --kv-events-encoding json
        --kv-events-connect=maybe
        --kv-events-allow-remote=maybe
    """,
}
"""The same; "*" are options of all commands that load a model, "sampling" of those that sample, "texts" of those that
print what they sample."""


def cases(table: dict[str, str]) -> list[tuple[str, str]]:
    return [(command, line.strip()) for command in GOOD for line in lines_of(table, command)]


def lines_of(table: dict[str, str], command: str) -> list[str]:
    shared = {
        "run": ("*", "sampling", "texts"),
        "chat": ("*", "sampling", "texts"),
        "serve": ("*", "sampling"),
        "mcp": ("*",),
    }.get(command, ())
    lines = "\n".join(table.get(name, "") for name in (command, *shared)).splitlines()
    for name, words in TOGETHER.items():
        lines = [line.replace(name, " ".join(words.split())) for line in lines]
    return [line for line in lines if line.strip()]
