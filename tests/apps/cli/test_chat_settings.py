"""Options of the next replies, by /set, and the facts of the model, by /show."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from prompt_toolkit.completion import CompleteEvent
from prompt_toolkit.document import Document

import localinfer
from localinfer.apps.terminal.loop import CommandCompleter
from localinfer.apps.terminal.model_commands import SETTINGS
from localinfer.engine.sampling.params import NUMBER_OPTIONS
from localinfer.generation.stream import StreamEvent
from tests.apps.cli.chat_session import Session
from tests.apps.cli.conftest import FakeLLM


@pytest.fixture
def session(fake_llm) -> Session:
    return Session(fake_llm)


@pytest.mark.parametrize(("line", "value"), [("/set top_k 7", 7), ("/set --top-k=7", 7), ("/set top-k 7", 7)])
def test_set_changes_an_option_of_the_next_reply(session, fake_llm, line, value):
    assert "top_k is 7" in session.type(line)
    session.type("hi")
    assert fake_llm.options[-1]["top_k"] == value
    session.type("/set top_k default", "hi")
    assert "top_k" not in fake_llm.options[-1]


def test_set_knows_other_names_and_the_two_options_that_are_no_sampling(session, fake_llm):
    session.type("/set repeat_penalty 1.5", "/set max_tokens 9", "/set seed 40", "hi")
    made = fake_llm.options[-1]
    assert (made["repetition_penalty"], made["max_tokens"], made["seed"]) == (1.5, 9, 40)
    session.type("/set seed random", "/set max_tokens default", "hi")
    assert (fake_llm.options[-1]["seed"], fake_llm.options[-1]["max_tokens"]) == (None, None)


@pytest.mark.parametrize("name", [*NUMBER_OPTIONS, "max_tokens", "seed"])
@pytest.mark.parametrize("value", ["-1e9", "warm", "nan"])
def test_set_refuses_a_value_out_of_range_with_the_range(session, name, value):
    before = dict(session.conversation.sampling)
    told = session.type(f"/set {name} {value}")
    assert re.search(rf"{name} is .*; it must be a (whole )?number(, | from )-?\d.* it stays .*", told)
    assert session.conversation.sampling == before
    assert "must be" not in session.type(f"/set {name}"), "shows it"


def test_what_the_models_file_recommends_is_shown_and_taken_back_to(session, fake_llm):
    fake_llm.defaults = {"temperature": 0.6}
    assert re.search(r"^temperature +0\.6; ", session.type("/set temperature"), re.MULTILINE)
    assert "0.9 (default 0.6, the model's)" in session.type("/set temperature 0.9", "/set temperature")
    assert "temperature is 0.6 " in session.type("/set temperature default")
    session.type("hi")
    assert "temperature" not in fake_llm.options[-1]


def test_set_lists_every_option_with_its_range(session):
    told = session.type("/set top_p 0.5", "/set")
    for name in SETTINGS:
        assert re.search(rf"^{name} ", told, re.MULTILINE)
    assert "0.5 (default 0.95); 0 to 1" in told
    assert "did you mean temperature?" in session.type("/set temperatur 1")


@pytest.mark.parametrize(
    ("typed", "value", "shown"),
    [
        ("stop END", ["END"], '"END"'),
        ('stop "END" two', ["END", "two"], '"END" "two"'),
        ("stop='a b' \"\\n\\n\"", ["a b", "\n\n"], '"a b" "\\n\\n"'),
        ('dry_sequence_breakers . ";"', [".", ";"], '"." ";"'),
        ("dry_sequence_breakers off", [], "off"),
        ("logit_bias 42=-5, 7=-inf", {42: -5.0, 7: float("-inf")}, "42=-5 7=-inf"),
        ("logit_bias=1=2", {1: 2.0}, "1=2"),
        ("format json", localinfer.JsonObject(), "json"),
    ],
)
def test_set_takes_options_that_are_no_numbers(session, fake_llm, typed, value, shown):
    name = re.split("[ =]", typed)[0]
    assert f"{name} is {shown} from the next reply on" in session.type(f"/set {typed}")
    session.type("hi")
    key = "constraint" if name == "format" else name
    assert fake_llm.options[-1][key] == value
    assert f" {shown} (default " in session.type(f"/set {name}")
    session.type(f"/set {name} default", "hi")
    assert key not in fake_llm.options[-1]


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        ('stop "END', "a quotation mark without its other one"),
        ("stop 'a'b", "a quotation mark without its other one"),
        ('stop ""', "none of them empty"),
        ('stop "\\x"', "no text of JSON"),
        ('stop "\\ud800"', "half of a character"),
        ("dry_sequence_breakers ab", "no token contains"),
        ("logit_bias 5", "must be ID=NUMBER"),
        ("logit_bias 5=warm", "must be ID=NUMBER"),
        ("logit_bias 5=1001", "from -1000 to 1000"),
        ("logit_bias -5=1", "0 or more"),
        ("format xml", "xml is not there"),
    ],
)
def test_set_refuses_what_has_another_form_and_says_which(session, typed, told):
    before = dict(session.conversation.sampling)
    answer = session.type(f"/set {typed}")
    assert told in answer and "; it stays off" in answer.replace('"\\n" ":" "\\"" "*"', "off")
    assert session.conversation.sampling == before


def test_replies_may_have_to_be_of_a_schema(session, fake_llm, tmp_path: Path):
    path = tmp_path / "my schema.json"
    path.write_text('{"type": "integer"}')
    assert "format is JSON of a schema" in session.type(f"/set format {path}", "hi")
    assert fake_llm.options[-1]["constraint"] == localinfer.JsonSchema('{"type": "integer"}')
    for wrong in ('{"type": "whole"}', "{"):
        path.write_text(wrong)
        assert "it stays JSON of a schema" in session.type(f"/set format {path}")
    session.type("/set format off", "hi")
    assert "constraint" not in fake_llm.options[-1]


def test_a_cut_reply_of_a_format_is_made_again_and_not_continued(session, fake_llm):
    fake_llm.pieces = [StreamEvent("{", 1, "length")]
    told = session.type("/set format json", "hi", "/continue")
    assert "so /regen makes it again; /set max_tokens N" in told and "/regen makes this one again" in told
    assert len(fake_llm.prompts) == 1
    session.type("/set format off", "/continue")
    assert len(fake_llm.prompts) == 2


def test_a_summary_has_no_format_and_ends_at_no_stop_text(session, fake_llm):
    session.type("/set format json", "/set stop x", "hi", "ho", "/context summarise")
    assert not {"constraint", "stop"} & fake_llm.options[-1].keys()


def test_biases_of_token_ids_are_not_those_of_another_model(session, fake_llm):
    session.loaded["other"] = other = FakeLLM()
    assert "logit_bias is off again" in session.type("/set logit_bias 5=1", "/model other", "hi")
    assert "logit_bias" not in other.options[-1]


def test_files_are_completed_as_formats(session, tmp_path: Path, monkeypatch):
    (tmp_path / "schema.json").touch()
    monkeypatch.chdir(tmp_path)
    completer = CommandCompleter(session.chat.commands.values())
    found = list(completer.get_completions(Document("/set format s"), CompleteEvent()))
    assert [one.text for one in found] == ["format schema.json"]


def test_show_tells_what_the_demo_model_is():
    with localinfer.load() as llm:
        session = Session(llm)
        told = session.type("/show")
        info = llm.info
        for fact in (info.name, info.architecture, info.quantization, f"{info.context_length:,} tokens", info.device):
            assert fact in told
        for name in ("parameters", "memory", "tools", "thinking", "template"):
            assert re.search(rf"^{name} +\S", told, re.MULTILINE)
        assert session.type("/show template").strip() == info.chat_template.strip()


def test_a_chat_template_does_nothing_to_the_terminal(session, fake_llm):
    fake_llm.info = SimpleNamespace(chat_template="{{ a }}\x1b[2J\u202e\n")
    assert session.type("/show template") == "{{ a }}\u241b[2J\ufffd\n"
    fake_llm.info = SimpleNamespace(chat_template=None)
    assert "no chat template" in session.type("/show template")
    assert "takes nothing, or template" in session.type("/show all")
