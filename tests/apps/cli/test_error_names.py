"""Errors name arguments as the caller knows them: on the command line, as options."""

import ast
import inspect
import re
from pathlib import Path

import localinfer
from localinfer.apps.cli import localinfer_command
from localinfer.generation.options import GenerationOptions, ReplyOptions
from localinfer.llm import LLM

REPOSITORY = Path(__file__).resolve().parents[3]
SOURCES = [path for folder in ("localinfer", "models") for path in (REPOSITORY / folder).rglob("*.py")]
NO_COMMAND_PASSES = {
    # Chats with tools, reasoning and template variables are asked for by programs only.
    *("tool_choice", "parallel_tool_calls", "template_variables", "thinking_budget", "continue_final_message"),
    # Sessions, which call Python functions.
    *("max_tool_rounds", "on_tool_call", "on_tool_result"),
    # Texts are what the command line knows, ids are for programs.
    *("dry_breaker_ids", "stop_token_ids", "token_ids", "bad_words"),
    # Made of options, which are checked before.
    *("disk_cache", "loop_stop"),
    # The command takes the default.
    *(
        "branch_tokens",
        "cache_salt",
        "length_penalty",
        "add_generation_prompt",
        "prompt_logprobs",
        "parse_special",
        "best_of",
    ),
}


def argument_names() -> set[str]:
    """Every argument of the public functions, options of generation included."""
    names = {*GenerationOptions.__annotations__, *ReplyOptions.__annotations__}
    functions = [localinfer.load, *(value for _, value in inspect.getmembers(LLM, inspect.isfunction))]
    for function in functions:
        names |= set(inspect.signature(function).parameters)
    return {name for name in names if "_" in name.strip("_")}


def option_names() -> set[str]:
    return {parameter.name or "" for command in localinfer_command.commands.values() for parameter in command.params}


def names_in_errors() -> dict[str, str]:
    """Words with underscores that stand alone in the texts of raised errors, and where."""
    found = {}
    for path in SOURCES:
        if "server" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                parts = [part.value for part in ast.walk(node.exc) if isinstance(part, ast.Constant)]
                for name in re.findall(r"(?<![\w./'-])[a-z]+(?:_[a-z]+)+(?![\w(/'-])", " ".join(map(str, parts))):
                    found[name] = f"{path.name}:{node.lineno}"
    return found


def test_arguments_named_in_errors_are_options_where_a_command_can_meet_them():
    arguments, options = argument_names(), option_names() | NO_COMMAND_PASSES
    named = {name: place for name, place in names_in_errors().items() if name in arguments}
    assert len(named) > 10, "the search finds what it is for"
    unknown = {name: place for name, place in named.items() if name not in options}
    assert not unknown, f"give the option the argument's name, or reword the error: {unknown}"
