"""The code and the commands of the README and of `docs/` do what they say, with small models in place of large ones."""

import ast
import contextlib
import inspect
import io
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import localinfer
from localinfer.apps.cli import main
from localinfer.apps.evaluate import measure
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.apps.show.certificate import certify
from localinfer.models import demo
from localinfer.storage import prompt_cache, response_store
from localinfer.storage.conversations import ConversationStore, SavedConversation
from tests.api.encoder_models import write_encoder
from tests.apps.server.local_servers import ServedModel, serving
from tests.models.talking_models import build_talking_model
from tests.support.comparing_model import write_clip, write_colqwen
from tests.support.documents import REPOSITORY, blocks, guides, parts_of
from tests.support.limits import seconds
from tests.support.seeing_model import picture_file, seeing_demo

ADDRESS = "http://127.0.0.1:8080"
RUN = {"cache", "chat", "compare", "completion", "embed", "list", "perplexity", "quantize", "rerank", "run", "sessions"}
RUN |= {"certify", "decide", "show", "tokenize", "warmup"}
"""Commands that end by themselves, and need no network and nothing of this machine's user."""
NEEDS_MORE = {"--context-length", "--device", "--gpu-layers", "--kv-window", "-folder", "LOCALINFER_ISA"}
"""Of lines that are for larger models, GPUs or folders of the hub; `test_documents.py` parses them."""
PYTHON = [(name, number) for name in guides() for number in range(len(blocks(name, "python")))]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the guides name."""
    folder = tmp_path_factory.mktemp("guides")
    shutil.copy(Path(demo.__file__).parent / "demo-f16.gguf", folder / "model.gguf")
    for name, skeleton in (("embedding-model", "bert-encoder"), ("reranker", "bert-reranker")):
        write_encoder(folder, skeleton).rename(folder / f"{name}.gguf")
    build_talking_model(folder, "llama-moe").rename(folder / "model-f16.gguf")
    shutil.copy(folder / "model-f16.gguf", folder / "model-q4.gguf")
    shutil.move(seeing_demo(folder / "encoders"), folder / "seeing.gguf")
    shutil.move(folder / "encoders" / "mmproj-demo-f16.gguf", folder / "mmproj-seeing.gguf")
    write_clip(folder / "siglip2-base-patch16-224")
    write_colqwen(folder / "colqwen2-v1.0-hf")
    for name in ("page", "photo"):
        (folder / f"{name}.jpg").write_bytes(picture_file())
    shutil.copy(folder / "mmproj-seeing.gguf", folder / "mmproj-q8_0.gguf")
    (folder / "pictures").mkdir()
    shutil.copy(folder / "page.jpg", folder / "pictures" / "page.jpg")
    (folder / "my-text.txt").write_text("Once upon a time there was a little dog. " * 60, encoding="utf-8")
    (folder / "texts.txt").write_text("a cat\na dog\n", encoding="utf-8")
    (folder / "notes.txt").write_text("Buy milk.\n", encoding="utf-8")
    asked = {
        "refund": {"type": "noul", "instructions": "So?"},
        "team": {"type": "choice", "criteria": {"A": None, "B": None}},
    }
    (folder / "model.cert").write_bytes(certify(str(folder / "model.gguf")).write())
    (folder / "questions.json").write_text(json.dumps(asked), encoding="utf-8")
    labelled = {"state": "I was charged twice.", "expected": {"refund": True, "team": "A"}}
    (folder / "labelled.jsonl").write_text(f"{json.dumps(labelled)}\n" * 4, encoding="utf-8")
    (folder / "states.jsonl").write_text('{"text": "Hello"}\n', encoding="utf-8")
    (folder / "calibration.json").write_text('{"refund": {"temperature": 2, "points": []}}', encoding="utf-8")
    (folder / "schema.json").write_text('{"type": "integer", "maximum": 9, "minimum": 1}', encoding="utf-8")
    (folder / "servers.json").write_text('{"mcpServers": {}}', encoding="utf-8")
    (folder / "template.jinja").write_text("{{ messages[-1].content }}", encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def users_files(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file of the user that runs the tests is read, changed or deleted."""
    monkeypatch.chdir(models)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    for module in (prompt_cache, response_store):
        monkeypatch.setattr(module, "user_folder", lambda kind: tmp_path / kind)
    # All of them would take as long as half of the other commands.
    monkeypatch.setattr(measure, "QUESTIONS", measure.QUESTIONS[:2])


@pytest.fixture(scope="module")
def served() -> Iterator[ServedModel]:
    with serving(ServerSettings(port=0)) as running:
        yield running


@pytest.mark.parametrize(("name", "number"), PYTHON)
def test_code_of_guides_runs(name: str, number: int, served: ServedModel) -> None:
    code = blocks(name, "python")[number]
    if "localinfer.ray" in code:
        check_options_of_the_application(code)
        return
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code.replace(ADDRESS, served.url), name, "exec"), {"__name__": "__main__"})
    assert printed.getvalue().strip()


def check_options_of_the_application(code: str) -> None:
    """A call of `localinfer.ray.app` gives options that it has; calling it needs Ray."""
    sources = [ast.parse(path.read_text("utf-8")) for path in (REPOSITORY / "localinfer/apps/fleet").glob("*.py")]
    (app,) = (
        node for tree in sources for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "app"
    )
    known = {argument.arg for argument in (*app.args.args, *app.args.kwonlyargs)}
    known |= inspect.signature(localinfer.load).parameters.keys()
    (call,) = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call))
    assert {word.arg for word in call.keywords} <= known


def commands_to_run() -> Iterator[list[str]]:
    """Arguments of the command lines of blocks that end, each once."""
    seen = set()
    for name in guides():
        for line in (line for text in blocks(name, "sh") for line in text.splitlines()):
            for words in parts_of(line) if not any(mark in line for mark in NEEDS_MORE) else []:
                is_run = words[0] == "localinfer" and words[1] in RUN and "org/repo:Q4_K_M" not in words
                if is_run and tuple(words) not in seen:
                    seen.add(tuple(words))
                    yield words[1:]


@pytest.mark.parametrize("words", [pytest.param(words, id=" ".join(words)) for words in commands_to_run()])
def test_commands_of_guides_end_well(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    for saved in ("garden", "roses") if "rename" not in words else ("garden",):
        conversation = SavedConversation.begin("demo", name=saved).with_turns(turns, system=None)
        ConversationStore(tmp_path / "state" / "localinfer" / "conversations").save(conversation)
    if words[0] == "quantize":
        # Calibration would take longer than all other commands, and other lines read the target.
        words = [*words[:2], "written.gguf", *words[3:], "--method", "rtn", "--chunks", "0"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    code = main(words)
    errors = capfd.readouterr().err
    assert code == 0 or (code == 3 and words[0] == "chat"), errors
    assert "Traceback" not in errors


def test_requests_of_curl_are_answered(served: ServedModel) -> None:
    lines = [line for name in guides() for text in blocks(name, "sh") for line in text.splitlines() if "curl" in line]
    assert lines
    for line in lines:
        (words,) = (words for words in parts_of(line) if words[0] == "curl")
        options = dict(zip(words[2::2], words[3::2], strict=True))
        header, _, value = options["-H"].partition(": ")
        reply = httpx.post(
            words[1].replace(ADDRESS, served.url),
            headers={header: value},
            content=options["-d"],
            timeout=seconds(15),
            trust_env=False,
        )
        found = json.loads(reply.text)
        assert reply.status_code == 200 and (found.get("choices") or found["answers"]), reply.text
