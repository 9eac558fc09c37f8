"""Kinds of models that do not run: their error names the reason or the nearest kinds, and the list is a command's."""

import json
from collections.abc import Callable
from difflib import SequenceMatcher

import pytest

from localinfer.apps.cli import main
from localinfer.errors import UnsupportedFormatError
from localinfer.models.checkpoint.families import FAMILIES, NOT_RUN_TYPES, find_family
from localinfer.models.decoder.architectures import (
    ARCHITECTURES,
    NOT_RUN,
    NUM_NEAREST,
    check_architecture,
    nearest_names,
    spelling,
)
from localinfer.models.decoder.block_config import OF_ANOTHER_CACHE

LONGEST = 300


def message(refuse: Callable[[], object]) -> str:
    with pytest.raises(UnsupportedFormatError) as caught:
        refuse()
    found = str(caught.value)
    assert len(found) <= LONGEST and "\n" not in found
    return found


def of_folder(name: object) -> str:
    return message(lambda: find_family({"model_type": name}))


def of_file(name: str) -> str:
    return message(lambda: check_architecture(name))


def test_every_known_kind_is_refused_with_its_reason() -> None:
    for refuse, reasons, run in ((of_file, NOT_RUN, ARCHITECTURES), (of_folder, NOT_RUN_TYPES, FAMILIES)):
        assert not reasons.keys() & run.keys()
        for name, reason in reasons.items():
            assert f"is {name!r}, {reason}, which this version does not run." in refuse(name)


@pytest.mark.parametrize("known", [ARCHITECTURES, FAMILIES], ids=["files", "folders"])
def test_other_spellings_of_a_kind_find_it(known: dict[str, object]) -> None:
    for number, name in enumerate(known):
        others = {other for other in known if spelling(other) == spelling(name)}
        spellings = (name.upper(), name.replace("_", "-"), name.replace("-", "_"), f"{name}_new")
        written = spellings[number % len(spellings)]
        nearest = nearest_names(written, known)
        assert 0 < len(set(nearest)) == len(nearest) <= NUM_NEAREST
        assert others & set(nearest), (written, nearest)


def test_an_unknown_kind_names_the_nearest_three_and_the_command() -> None:
    found = of_file("gemma9")
    assert "'gemma', 'gemma4' and 'gemma3'" in found and "`localinfer list --architectures` has all" in found
    found = of_folder("qwen9_moe")
    assert "'qwen3_moe'" in found and "'qwen2_moe'" in found and "`localinfer list --architectures` has all" in found
    for name in ("", "zz", "x" * 5000):
        assert "nearest" not in of_file(name) and "nearest" not in of_folder(name)


@pytest.mark.parametrize("known", [ARCHITECTURES, FAMILIES], ids=["files", "folders"])
def test_letters_of_a_name_that_is_far_too_long_are_not_compared(
    known: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which took seconds for 100,000 of them."""
    monkeypatch.setattr(SequenceMatcher, "ratio", lambda _: pytest.fail("compared"))
    for name in ("x" * 5000, *(2000 * other for other in known)):
        assert not nearest_names(name, known)


@pytest.mark.parametrize("name", [None, 1, [], {}, ["x" * 5000]])
def test_a_type_that_is_no_name_is_refused_in_one_short_line(name: object) -> None:
    assert "not one of the" in of_folder(name)


def test_a_type_that_runs_from_files_alone_says_so() -> None:
    alone = {spelling(name) for name in ARCHITECTURES} - {spelling(name) for name in FAMILIES}
    alone -= {spelling(name) for name in NOT_RUN_TYPES}
    for name in alone:
        assert "runs from GGUF files" in of_folder(name) and "Use a GGUF file of the model." in of_folder(name)


def test_a_wrapper_is_refused_for_its_text_model() -> None:
    found = message(lambda: find_family({"model_type": "unheard_of", "text_config": {"model_type": "deepseek_v4"}}))
    assert "text_config.model_type is 'deepseek_v4', whose attention" in found


def test_the_command_lists_what_runs_and_what_is_known_not_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "--architectures"]) == 0
    words = set(capsys.readouterr().out.replace(",", " ").replace(":", " ").split())
    assert {*ARCHITECTURES, *FAMILIES, *NOT_RUN, *NOT_RUN_TYPES} <= words
    assert main(["list", "--architectures", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["gguf"] == {"run": sorted(ARCHITECTURES), "not_run": NOT_RUN}
    assert found["folders"] == {"run": sorted(FAMILIES), "not_run": NOT_RUN_TYPES}


def test_a_draft_model_is_refused_with_its_target() -> None:
    for name, target in OF_ANOTHER_CACHE.items():
        assert repr(target) in of_file(name)
