"""An option is written once: callers' types, commands' flags, config.toml and the server's fields follow the table."""

from dataclasses import fields
from pathlib import Path
from typing import get_type_hints

import pytest

from localinfer.apps.cli import localinfer_command
from localinfer.apps.config import read_config
from localinfer.apps.server.replies.fields import GenerationFields
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.apps.server_options import ServerOption, server_options
from localinfer.engine.sampling.params import NUMBER_OPTIONS, SamplingOptions, SamplingParams
from localinfer.errors import RequestError
from localinfer.generation.options import GenerationOptions


def test_callers_see_the_types_of_the_sampling_parameters():
    assert get_type_hints(SamplingOptions) == get_type_hints(SamplingParams)
    assert get_type_hints(SamplingOptions).items() <= get_type_hints(GenerationOptions).items()


def test_defaults_are_in_range():
    SamplingParams(**{name: option.default for name, option in NUMBER_OPTIONS.items()})
    assert {member.name for member in fields(SamplingParams)} > NUMBER_OPTIONS.keys()


@pytest.mark.parametrize("command", ["run", "chat", "serve"])
def test_every_numeric_option_is_a_flag(command: str):
    flags = {parameter.name: parameter for parameter in localinfer_command.commands[command].params}
    for name, option in NUMBER_OPTIONS.items():
        assert flags[name].opts[0] == f"--{name.replace('_', '-')}"
        # What is not given is as the model's file recommends, and only then ours.
        assert not isinstance(flags[name].default, int | float)
        assert not option.is_common or f"or {option.default:g}." in flags[name].help


def test_every_numeric_option_is_a_member_of_requests():
    aliases = {option.alias for option in NUMBER_OPTIONS.values()} - {None}
    assert NUMBER_OPTIONS.keys() | aliases <= set(GenerationFields.__struct_fields__)


@pytest.mark.parametrize("option", server_options(), ids=lambda option: option.key)
def test_every_server_option_is_a_flag_a_setting_and_a_key_of_the_configuration(option: ServerOption, tmp_path: Path):
    flags = {parameter.name: parameter for parameter in localinfer_command.commands["serve"].params}
    assert flags[option.key].opts[0] == option.flag
    assert getattr(ServerSettings(), option.member) == option.default
    file = tmp_path / "config.toml"
    file.write_text(f"[serve]\n{option.key} = {'[]' if option.kind is tuple else 3}\n")
    if option.in_config:
        assert read_config(file).serve == {option.key: () if option.kind is tuple else 3}
    else:
        with pytest.raises(RequestError, match="there is no setting"):
            read_config(file)
    if option.kind in (int, float):
        with pytest.raises(RequestError, match=option.member):
            ServerSettings(**{option.member: option.least - 1})
        file.write_text(f"[serve]\n{option.key} = {option.least - 1}\n")
        with pytest.raises(RequestError, match=option.key):
            read_config(file)
