"""Everything that a public call takes or gives can be imported from `localinfer`, for whoever annotates a program."""

import ast
import dataclasses
import inspect
import sys
import typing
from collections.abc import Callable, Iterator
from functools import cache, cached_property
from importlib import import_module
from typing import Any

import pytest

import localinfer

INTERNAL = {
    ("Tokenizer", "special_spellings(return)"),
    ("Tokenizer", "fill_in_tokens(return)"),
    ("Tokenizer", "vocabulary(return)"),
    ("LLM", "engine_stats(return)"),
    ("LLM", "encode_prompt(parts)"),
    ("LLM", "encode_prompt(return)"),
    ("LLM", "encode_chat(return)"),
    ("LLM", "logits(token_ids)"),
    *(("LLM", f"{name}(prompt)") for name in ("complete", "acomplete", "stream")),
    ("LLM", "prefill(return)"),
    *(("LLM", place) for place in ("embed(prompt)", "embed_many(prompts)", "rerank(documents)")),
    *(("LLM", f"embedding_inputs({place})") for place in ("prompts", "return")),
    ("LLM", "store_prompt(return)"),
    ("LLM", "handover_fingerprint(return)"),
    ("Session", "from_json(llm)"),
    ("DecisionCalibration", "fit(llm)"),
    ("DecisionCalibration", "questions"),
    ("TextStream", "request(return)"),
    ("TextStream", "resume(text)"),
    ("KVEventPublisher", "attach(return)"),
}
"""Public to other packages of localinfer and not to programs; the part of an LLM that a session uses."""

EXPORTED = {name: getattr(localinfer, name) for name in localinfer.__all__ if name != "errors"}


@cache
def imported_names(module: Any) -> dict[str, Any]:
    """Imports of a module, with those for type checkers only."""
    names: dict[str, Any] = {}
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        if not isinstance(node, ast.If) or ast.unparse(node.test) != "TYPE_CHECKING":
            continue
        for one in ast.walk(node):
            if isinstance(one, ast.ImportFrom) and one.module:
                module_named = import_module(one.module)
                names |= {alias.asname or alias.name: getattr(module_named, alias.name) for alias in one.names}
            elif isinstance(one, ast.Import):
                names |= {alias.asname or alias.name: import_module(alias.name) for alias in one.names}
    return names


def hints(value: Any) -> dict[str, Any]:
    # What takes options of a record has their annotations.
    modules = import_module("localinfer.loading.load_options"), sys.modules[value.__module__]
    names = {name: one for module in modules for name, one in {**vars(module), **imported_names(module)}.items()}
    return typing.get_type_hints(value, names)


def classes_in(annotation: Any) -> Iterator[type]:
    """The classes of this package in an annotation, at every level."""
    if isinstance(annotation, type) and not typing.get_args(annotation):
        if annotation.__module__.startswith("localinfer"):
            yield annotation
        return
    for part in typing.get_args(annotation):
        for one in part if isinstance(part, list | tuple) else [part]:
            yield from classes_in(one)


def calls_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The members of an export: itself, or its public methods and properties."""
    if not inspect.isclass(value):
        yield "", value
        return
    for name, member in vars(value).items():
        if name.startswith("_") and name not in ("__iter__", "__next__", "__enter__", "__aiter__", "__anext__"):
            continue
        if isinstance(member, property):
            yield name, member.fget
        elif isinstance(member, cached_property):
            yield name, member.func
        elif isinstance(member, classmethod | staticmethod):
            yield name, member.__func__
        elif inspect.isfunction(member):
            yield name, member


def annotations_of(value: Any) -> Iterator[tuple[str, Any]]:
    for name, call in calls_of(value):
        if inspect.isfunction(call):
            yield from ((f"{name}({argument})", hint) for argument, hint in hints(call).items())
    if inspect.isclass(value) and (dataclasses.is_dataclass(value) or hasattr(value, "__annotations__")):
        yield from hints(value).items()


@pytest.mark.parametrize("name", sorted(EXPORTED))
def test_types_of_public_calls_are_exported(name: str) -> None:
    exported = {id(value) for value in EXPORTED.values()}
    missing = {
        f"{place}: {found.__module__}.{found.__qualname__}"
        for place, annotation in annotations_of(EXPORTED[name])
        if (name, place) not in INTERNAL
        for found in classes_in(annotation)
        if id(found) not in exported and not issubclass(found, localinfer.errors.LocalinferError)
    }
    assert not missing


def test_every_public_call_is_annotated() -> None:
    bare = []
    for name, value in EXPORTED.items():
        for member, call in calls_of(value):
            if inspect.isfunction(call):
                parameters = list(inspect.signature(call).parameters.values())
                own = [one for one in parameters if one.name not in ("self", "cls")]
                is_typed = all(one.annotation is not inspect.Parameter.empty for one in own)
                if not is_typed or inspect.signature(call).return_annotation is inspect.Signature.empty:
                    bare.append(f"{name}.{member}")
    assert not bare


def test_a_class_that_is_not_exported_is_found() -> None:
    class Answer:
        """Stands in for one that a call gives."""

    Answer.__module__ = "localinfer.answer"

    def ask() -> list[tuple[Answer, int] | None]:
        return []

    found: Callable[..., Any] = ask
    assert list(classes_in(typing.get_type_hints(found, None, {"Answer": Answer})["return"])) == [Answer]
