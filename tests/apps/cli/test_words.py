"""A value that has a word on the command line has the same one in Python, and the other way about."""

from typing import Any

import click
import pytest

import localinfer
from localinfer.apps.cli import localinfer_command
from localinfer.errors import RequestError
from localinfer.generation.embedding import POOLINGS
from localinfer.kernels.kv_layout import parse_kv_type
from localinfer.loading.load_options import SPECULATION, HeaderOptions
from localinfer.loading.options import check_model_options
from localinfer.models.decoder.rope_options import SCALINGS
from localinfer.models.load.device_request import DEVICES

COMMANDS = {name: {one.name: one for one in command.params} for name, command in localinfer_command.commands.items()}
LOADING = COMMANDS["run"]


def words_of(parameter: click.Parameter) -> list[str]:
    """The words that an option takes: its choices, and its default where that is one."""
    choices = list(parameter.type.choices) if isinstance(parameter.type, click.Choice) else []
    return choices + [parameter.default] * (isinstance(parameter.default, str) and parameter.default not in choices)


def given_to_load(name: str, word: str) -> dict[str, Any]:
    """Arguments of `load` for a word of the command's option of this name."""
    if name == "rope_scaling":
        return {"rope": localinfer.RopeOptions(scaling=word)}
    return {name: word, **({"draft": "small.gguf"} if word == "draft" else {})}


def test_python_takes_every_word_of_the_options_of_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("localinfer.models.load.assistant.is_assistant", lambda _: False)
    worded = {name: words_of(parameter) for name, parameter in LOADING.items() if words_of(parameter)}
    assert worded.keys() >= {"device", "gpu_layers", "kv_type", "speculation", "rope_scaling"}
    for name, words in worded.items():
        for word in words:
            check_model_options(HeaderOptions(**given_to_load(name, word)))


@pytest.mark.parametrize(
    ("command", "name", "words"),
    [
        ("run", "speculation", SPECULATION),
        ("run", "rope_scaling", SCALINGS),
        ("embed", "pooling", POOLINGS),
        ("serve", "pooling", POOLINGS),
        ("quantize", "device", DEVICES),
    ],
)
def test_the_command_takes_every_word_of_python(command: str, name: str, words: tuple[str, ...]) -> None:
    assert set(words_of(COMMANDS[command][name])) == set(words)


def test_what_is_no_word_is_refused_in_words_by_both() -> None:
    for name, wrong in {"speculation": "on", "device": "tpu", "kv_type": "q9", "gpu_layers": "many"}.items():
        parameter = LOADING[name]
        with pytest.raises(click.BadParameter, match=wrong):
            parameter.process_value(click.Context(localinfer_command.commands["run"]), wrong)
        with pytest.raises(localinfer.errors.LocalinferError, match=wrong):
            check_model_options(HeaderOptions(**{name: wrong}))
    with pytest.raises(RequestError, match="q9"):
        parse_kv_type("q9")
