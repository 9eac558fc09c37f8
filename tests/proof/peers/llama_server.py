"""Stands in for llama-server in llama.cpp's own server tests: its options become those of `localinfer serve`.

It is started by those tests, in the place of their binary (llama_server_suite.py), and becomes the server. Options that
change nothing here are listed in IGNORED; one that is in no list ends the program with its name.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path

from tests.proof.peers.suite_models import MODELS_VARIABLE, SuiteModels

IGNORED = (
    "--offline --cont-batching --embedding --reranking --kv-unified --swa-full --jinja --no-jinja --no-mmproj"
    " --no-cache-idle-slots --backend_sampling"
)
IGNORED_WITH_VALUE = (
    "--batch-size --ubatch-size --n-gpu-layers -fa --cache-ram --spec-draft-n-max --spec-draft-n-min --tags"
)
TEMPLATES = {
    "chatml": "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama3": "{% for message in messages %}<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{{ message['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "command-r": "{% for message in messages %}<|START_OF_TURN_TOKEN|>"
    "{{ {'system': '<|SYSTEM_TOKEN|>', 'user': '<|USER_TOKEN|>'}.get(message['role'], '<|CHATBOT_TOKEN|>') }}"
    "{{ message['content'] | trim }}<|END_OF_TURN_TOKEN|>{% endfor %}"
    "{% if add_generation_prompt %}<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{% endif %}",
}
"""What llama-server calls by a name, written anew."""


def main() -> None:
    """Become `localinfer serve`."""
    models = SuiteModels(Path(os.environ[MODELS_VARIABLE]))
    if "LLAMA_CACHE" in os.environ:
        # llama-server makes it for its downloads; the tests save slots there, wherever their run begins.
        Path(os.environ["LLAMA_CACHE"]).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="peer-"))
    arguments = translated(parser().parse_args(), models, folder)
    print("localinfer serve", *arguments, flush=True)
    os.execv(sys.executable, [sys.executable, "-m", "localinfer", "serve", *arguments])


def parser() -> argparse.ArgumentParser:
    """The options that llama.cpp's tests give."""
    made = argparse.ArgumentParser(allow_abbrev=False)
    for name in IGNORED.split():
        made.add_argument(name, action="store_true")
    for name in IGNORED_WITH_VALUE.split():
        made.add_argument(name)
    for name in ("--metrics", "--slots", "--no-slots", "--context-shift", "--no-ui", "--verbose"):
        made.add_argument(name, action="store_true")
    made.add_argument("--no-models-autoload", action="store_true")
    for name in ("--port", "--host", "--temp", "--seed", "--model", "--model-draft", "--hf-repo", "--hf-file"):
        made.add_argument(name)
    for name in ("--threads", "--pooling", "--alias", "-ctk", "-ctv", "--slot-save-path", "--spec-type", "--api-key"):
        made.add_argument(name)
    for name in ("--reasoning", "--reasoning-format", "--chat-template", "--chat-template-file", "--models-preset"):
        made.add_argument(name)
    for name in ("--ctx-size", "--parallel", "--n-predict", "--sleep-idle-seconds", "--models-max"):
        made.add_argument(name, type=int)
    return made


def translated(given: argparse.Namespace, models: SuiteModels, folder: Path) -> list[str]:
    """The options of `localinfer serve` for those of llama-server. folder: for files that they need."""
    arguments = ["--host", given.host, "--port", given.port, "--socket", str(folder / "peer.sock"), "--no-config"]
    arguments += ["--no-disk-cache", "--shutdown-seconds", "0"]
    slots = given.parallel or 4
    if given.hf_repo is None and given.model is None:
        arguments += router_options(given, models)
    else:
        arguments += ["-m", str(given.model or models.find(given.hf_repo, given.hf_file))]
    arguments += ["--parallel", str(slots)]
    for name, is_off in (("slots", not given.slots), ("metrics", not given.metrics), ("page", given.no_ui)):
        arguments += [f"--no-{name}"] if is_off else []
    if given.slot_save_path is not None:
        arguments += ["--slot-save-path", given.slot_save_path]
    if given.ctx_size is not None:
        arguments += ["-c", str(given.ctx_size if given.kv_unified else given.ctx_size // slots)]
    if given.pooling is not None:
        arguments += ["--pooling", given.pooling]
    if given.ctk is not None:
        arguments += ["--kv-type", f"{given.ctk}/{given.ctv or given.ctk}"]
    if given.model_draft is not None and given.spec_type is not None:
        arguments += ["--speculation", "draft", "--draft", given.model_draft]
    for name, value in (("--temp", given.temp), ("--seed", given.seed), ("--alias", given.alias)):
        arguments += [] if value is None else [name, value]
    if given.n_predict is not None and given.n_predict > 0:
        arguments += ["-n", str(given.n_predict)]
    if given.context_shift:
        arguments.append("--context-shift")
    if given.reasoning is not None:
        arguments += ["--reasoning", given.reasoning]
    if given.sleep_idle_seconds is not None:
        arguments += ["--idle-unload", str(given.sleep_idle_seconds)]
    if given.api_key is not None:
        arguments += ["--api-key", given.api_key]
    if given.chat_template is not None:
        text = TEMPLATES.get(given.chat_template, given.chat_template)
        arguments += ["--chat-template", written(folder / "template.jinja", text)]
    if given.chat_template_file is not None:
        arguments += ["--chat-template", given.chat_template_file]
    return arguments


def router_options(given: argparse.Namespace, models: SuiteModels) -> list[str]:
    """Every model of the suite, as many loaded at a time as are wanted."""
    limit = [] if given.models_max is None else ["--memory-limit", str(models.memory_of(given.models_max))]
    return ["--models", str(models.cached()), *limit]


def written(path: Path, text: str) -> str:
    """The name of a file that holds a text."""
    path.write_text(text, encoding="utf-8")
    return str(path)


if __name__ == "__main__":
    main()
