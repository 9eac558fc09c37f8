"""What a caller sets in place of what a model's file says, and what is kept on disk under such settings."""

import math
from pathlib import Path
from typing import Any

import pytest

import localinfer
from localinfer.apps.cli import main
from localinfer.apps.server.router.model_folder import measure_need
from localinfer.errors import ModelFileError, RequestError, UnsupportedFormatError
from localinfer.loading.options import model_changes, model_path
from localinfer.models.decoder.rope_options import RopeOptions
from localinfer.models.load.loader import load_model, open_model_file, read_config
from localinfer.models.load.model_changes import parse_override
from localinfer.storage.fingerprint import ModelIdentity
from tests.models.small_models import write_small_llama
from tests.support.checkpoint_files import LLAMA_CONFIG, llama_weights, write_folder

DEMO = model_path(None)
TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("a.b=1", 1),
        ("a.b=-7", -7),
        ("a.b=1.5", 1.5),
        ("a.b=1e6", 1e6),
        ("a.b=true", True),
        ("a.b=false", False),
        ("a.b=yarn", "yarn"),
        ("a.b=", ""),
        ("a.b=c=d", "c=d"),
        ("a.b=int:5", 5),
        ("a.b=float:5", 5.0),
        ("a.b=bool:true", True),
        ("a.b=str:5", "5"),
        ("a.b=str:", ""),
        ("a.b=other:5", "other:5"),
    ],
)
def test_values_are_read_by_what_they_look_like_or_by_their_type(text: str, wanted: object) -> None:
    key, value = parse_override(text)
    assert (key, value, type(value)) == ("a.b", wanted, type(wanted))


@pytest.mark.parametrize("text", ["a.b", "=1", "a=int:1.5", "a=int:x", "a=float:x", "a=bool:1", "a=bool:yes"])
def test_values_that_are_not_of_their_type_are_refused(text: str) -> None:
    with pytest.raises(RequestError):
        parse_override(text)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("llama.rope.freq_base_typo", 1.0, "llama.rope.freq_base_typo cannot be set"),
        ("qwen2.rope.freq_base", 1.0, "qwen2.rope.freq_base cannot be set"),
        ("general.nonsense", 1, "general.nonsense cannot be set"),
        ("tokenizer.ggml.nonsense", 1, "tokenizer.ggml.nonsense cannot be set"),
        ("llama.rope.freq_base", "high", "llama.rope.freq_base was set to 'high'; wanted a number"),
        ("llama.rope.freq_base", -1.0, "llama.rope.freq_base was set to -1.0"),
        ("llama.block_count", 1.5, "llama.block_count was set to 1.5; wanted a whole number"),
        ("llama.block_count", 10**400, "llama.block_count was set to a number of about"),
        ("llama.attention.head_count", 6, "llama.attention.head_count"),
        ("llama.rope.freq_base", math.nan, "is set to nan"),
        ("llama.rope.freq_base", [1.0], r"is set to \[1.0\]"),
        ("llama.rope.freq_base", None, "is set to missing"),
        ("general.name", "\ud800", "is set to"),
        ("\ud800", 1, "cannot be set"),
        ("", 1, "cannot be set"),
        ("a\nb", 1, "cannot be set"),
    ],
)
def test_overrides_that_nothing_reads_or_takes_are_refused_by_name(key: str, value: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        localinfer.load(overrides={key: value}, speculation=None)


def test_override_of_a_value_this_version_does_not_know_says_so() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"llama\.rope\.scaling\.type is 'magic'"):
        localinfer.load(overrides={"llama.rope.scaling.type": "magic"}, speculation=None)
    with pytest.raises(ModelFileError, match="'nonsense'"):
        localinfer.load(overrides={"general.architecture": "nonsense"}, speculation=None)


def test_overrides_change_the_model_its_tokenizer_and_its_context() -> None:
    with localinfer.load(speculation=None, threads=1) as llm:
        plain, ids = llm.logits([1, 2, 3]), llm.tokenizer.encode("hello")
    overrides = {"llama.context_length": 64, "llama.rope.freq_base": 123.0, "tokenizer.ggml.add_bos_token": False}
    with localinfer.load(overrides=overrides, speculation=None, threads=1) as llm:
        assert llm.context_length == 64
        assert not (llm.logits([1, 2, 3]) == plain).all()
        assert ids[1:] == llm.tokenizer.encode("hello")


def test_overrides_reach_a_folder_too(tmp_path: Path) -> None:
    weights = llama_weights()
    folder = write_folder(tmp_path / "a", weights)
    other = write_folder(tmp_path / "b", weights, {**LLAMA_CONFIG, "rope_theta": 500.0})
    with localinfer.load(other, speculation=None, threads=1) as llm:
        wanted = llm.logits(list(range(20)))
    with localinfer.load(
        folder, speculation=None, threads=1, overrides={"llama.rope.freq_base": 500.0}, rope=RopeOptions()
    ) as llm:
        assert (llm.logits(list(range(20))) == wanted).all()
    with pytest.raises(RequestError, match=r"llama\.rope\.freq_base was set to 0"):
        localinfer.load(folder, speculation=None, threads=1, overrides={"llama.rope.freq_base": 0})


@pytest.mark.parametrize("form", ["text", "path", "str path"])
def test_chat_template_is_taken_as_text_or_by_its_path(form: str, tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE, "utf-8")
    given: Any = {"text": TEMPLATE, "path": path, "str path": str(path)}[form]
    with localinfer.load(chat_template=given, speculation=None, threads=1) as llm:
        assert llm.render_chat(HELLO, add_generation_prompt=False) == "<hello>"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for %}", "does not compile"),
        ("{{ \ud800 }}", "lone surrogates"),
        ("nowhere.jinja", "cannot be read"),
        (7, "chat_template is 7"),
        ("nul\0", "cannot be read"),
    ],
)
def test_chat_template_that_is_none_is_refused(template: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        localinfer.load(chat_template=template, speculation=None)


def test_chat_template_file_that_is_no_text_or_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "template.jinja"
    path.write_bytes(b"\xff\xfe{{")
    with pytest.raises(RequestError, match="cannot be read"):
        localinfer.load(chat_template=path, speculation=None)
    path.write_bytes(b"a" * ((1 << 20) + 1))
    with pytest.raises(RequestError, match="more than 1048576 bytes"):
        localinfer.load(chat_template=path, speculation=None)


def test_chat_template_for_a_model_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="a chat template needs a tokenizer"):
        localinfer.load(write_small_llama(tmp_path / "model.gguf"), chat_template=TEMPLATE, speculation=None)


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "empty": {"rope": RopeOptions(), "overrides": {}},
    "template": {"chat_template": TEMPLATE},
    "override": {"overrides": {"llama.rope.freq_base": 20000.0}},
    "another override": {"overrides": {"llama.rope.freq_base": 20001.0}},
    "name": {"overrides": {"general.name": "another"}},
    "base": {"rope": RopeOptions(base=30000.0)},
    "linear": {"rope": RopeOptions(scale=2.0)},
    "more linear": {"rope": RopeOptions(scale=3.0)},
    "yarn": {"rope": RopeOptions(scaling="yarn", scale=2.0)},
    "yarn original": {"rope": RopeOptions(scaling="yarn", scale=2.0, yarn_original_context=512)},
    "yarn kept": {"rope": RopeOptions(scaling="yarn", scale=2.0, yarn_extrapolation_factor=0.5)},
    "yarn attention": {"rope": RopeOptions(scaling="yarn", scale=2.0, yarn_attention_factor=0.5)},
    "yarn fast": {"rope": RopeOptions(scaling="yarn", scale=2.0, yarn_beta_fast=16.0)},
    "yarn slow": {"rope": RopeOptions(scaling="yarn", scale=2.0, yarn_beta_slow=2.0)},
    "yarn of the context": {"rope": RopeOptions(scaling="yarn"), "context_length": 4096},
    "yarn of a longer context": {"rope": RopeOptions(scaling="yarn"), "context_length": 8192},
}


def test_fingerprint_differs_for_all_options_that_differ() -> None:
    keys: dict[bytes, str] = {}
    for name, options in OPTIONS.items():
        context_length = options.get("context_length")
        changes = model_changes(**{key: value for key, value in options.items() if key != "context_length"})
        file = open_model_file(DEMO, changes, context_length)
        known = ModelIdentity(file, "layout", read_config(file), None).known()
        file.close()
        assert known is not None
        if name != "empty":
            assert known.key not in keys, (name, keys.get(known.key))
        keys[known.key] = name
    assert len(keys) == len(OPTIONS) - 1, "what sets nothing is what was there before"


def test_pages_on_disk_are_used_under_the_same_options_only(tmp_path: Path) -> None:
    prompt = [5] * 100

    def cached(**options: Any) -> int:
        with localinfer.load(
            disk_cache=True, disk_cache_folder=tmp_path, speculation=None, threads=1, **options
        ) as llm:
            return llm.complete(prompt, max_tokens=40, ignore_eos=True).stats.cached_tokens

    for name in ("none", "linear", "yarn", "base", "override", "template"):
        assert cached(**OPTIONS[name]) == 0, name
    for name in ("none", "linear", "yarn", "base", "override", "template"):
        assert cached(**OPTIONS[name]) > 0, name


def test_session_file_of_other_options_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "session"
    with localinfer.load(speculation=None, threads=1) as llm:
        llm.complete([5] * 40, max_tokens=4)
        llm.save_session(path)
    with (
        localinfer.load(speculation=None, threads=1, rope=RopeOptions(scale=2.0)) as llm,
        pytest.raises(localinfer.errors.SessionMismatchError, match="model settings"),
    ):
        llm.load_session(path)


def test_server_counts_memory_for_the_context_asked_for(tmp_path: Path) -> None:
    assert measure_need(DEMO, "f16").context_length == 1024
    changes = model_changes(rope=RopeOptions(scaling="yarn"))
    assert measure_need(DEMO, "f16", changes, 4096).context_length == 4096


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--set", "llama.nonsense=1"], "llama.nonsense cannot be set"),
        (["--set", "nonsense"], "give KEY=VALUE"),
        (["--set", "llama.rope.freq_base=int:x"], "not of type int"),
        (["--rope-scaling", "magic"], "--rope-scaling"),
        (["--rope-scale", "0"], "scale is 0.0"),
        (["--rope-scale", "2", "--rope-frequency-scale", "0.5"], "give one of them"),
        (["--yarn-beta-fast", "8"], "--yarn-beta-fast applies to YaRN only"),
        (["--yarn-original-context", "0"], "--yarn-original-context is 0"),
        (["--rope-scaling", "yarn"], "give a scale, or a --context-length above the 1024 tokens"),
        (["--chat-template", "nowhere"], "nowhere"),
    ],
)
def test_command_line_refuses_by_name(words: list[str], found: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "-p", "Once", "-n", "1", "--no-disk-cache", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1 and found in error


def output(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["run", "-p", "Once upon a time", "-n", "30", "--temperature", "0", "--no-disk-cache", *arguments]) == 0
    return capsys.readouterr().out


def test_command_line_options_give_the_text_of_the_same_metadata(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--rope-scaling", "yarn", "--rope-scale", "4", "--yarn-beta-fast", "8", "--rope-base", "300"]
    settings = [
        "rope.scaling.type=yarn",
        "rope.scaling.factor=4",
        "rope.scaling.yarn_beta_fast=8",
        "rope.freq_base=3e2",
    ]
    said = [word for setting in settings for word in ("--set", f"llama.{setting}")]
    found = output(asked, capsys)
    assert output(said, capsys) == found != output([], capsys)


def test_draft_model_keeps_its_own_settings() -> None:
    with localinfer.load(draft=DEMO, rope=RopeOptions(scale=2.0), threads=1) as llm:
        with localinfer.load(rope=RopeOptions(scale=2.0), threads=1, speculation=None) as plain:
            wanted = plain.complete("Once", max_tokens=20, temperature=0).token_ids
        assert llm.complete("Once", max_tokens=20, temperature=0).token_ids == wanted


def test_model_that_was_refused_leaves_its_file_closed(tmp_path: Path) -> None:
    path = write_small_llama(tmp_path / "model.gguf")
    with pytest.raises(RequestError):
        load_model(path, changes=model_changes(overrides={"llama.nonsense": 1}), threads=1)
    path.unlink()
