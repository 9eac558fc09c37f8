"""A sampling option is written once: callers' types, the commands' flags and the server's fields follow the table."""

from dataclasses import fields
from typing import get_type_hints

import pytest

from localinfer.apps.cli import localinfer_command
from localinfer.apps.server.replies.fields import GenerationFields
from localinfer.engine.sampling.params import NUMBER_OPTIONS, SamplingOptions, SamplingParams
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
