"""`show --verify` reads every weight and lets the model read a text."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from localinfer.apps.cli import localinfer_command
from localinfer.apps.show.verify import verify_model
from localinfer.errors import UnsupportedFormatError
from tests.models.checks.broken_models import demo, edited, small_llama
from tests.models.text.vocabularies import vocabulary_file

TEMPLATE = "tokenizer.chat_template"
TURNS = "{% for message in messages %}{{ '<|im_start|>' + message['content'] + 'END' }}{% endfor %}"


def found(path: Path) -> list[tuple[str, bool, str]]:
    return [(one.check, one.is_error, one.message) for one in verify_model(str(path)).findings]


@pytest.mark.parametrize("name", ["demo-f16", "demo-q4_k_m"])
def test_nothing_is_wrong_with_the_demo_model(name: str) -> None:
    result = verify_model(str(demo().with_name(f"{name}.gguf")))
    assert result.findings == [] and result.unchecked == []


def one_value(value: float, row: int) -> Any:
    def change(weights: Any) -> None:
        weights[row, 3] = value

    return change


def rows_alike(weights: Any) -> None:
    weights[:] = weights[0]


WEIGHTS: dict[str, tuple[dict[str, Any], str, bool, str]] = {
    "one NaN": ({"blk.2.ffn_down.weight": one_value(np.nan, 31)}, "weights not finite", True, "has 1 values"),
    "one infinite embedding": ({"token_embd.weight": one_value(np.inf, 39)}, "weights not finite", False, "some texts"),
    "a flipped bit": (
        {"blk.0.ffn_up.weight": one_value(9000.0, 17)},
        "weights outlier",
        False,
        "has weights of 9e+03 in row 17",
    ),
    "one output": ({"output.weight": rows_alike}, "output", True, "every token is as likely as any other"),
}


@pytest.mark.parametrize("name", list(WEIGHTS))
def test_a_single_broken_weight_is_found(name: str, tmp_path: Path) -> None:
    changes, *wanted, words = WEIGHTS[name]
    check, is_error, message = found(edited(small_llama(tmp_path), tmp_path / "broken.gguf", changes=changes))[0]
    assert [check, is_error] == wanted and words in message


@pytest.mark.parametrize(
    ("end", "check", "words"),
    [
        ("<|im_start|>", "end of turn", "closes replies with <|im_start|>, which ends no generation here"),
        ("<|done|><|im_end|>", "chat template", "writes <|done|>, no token of this vocabulary, beside others"),
        ("<|eot_id|>", "end of turn", "closes replies with <|eot_id|>, which is no token"),
    ],
)
def test_a_rendered_chat_shows_what_its_template_gets_wrong(end: str, check: str, words: str, tmp_path: Path) -> None:
    path = edited(demo(), tmp_path / "broken.gguf", settings={TEMPLATE: TURNS.replace("END", end)})
    ((name, is_error, message),) = found(path)
    assert (name, is_error) == (check, False) and words in message


def test_a_vocabulary_alone_is_checked_as_such(tmp_path: Path) -> None:
    result = verify_model(str(vocabulary_file("gpt-2", tmp_path)))
    assert result.findings == []
    assert result.unchecked == ["settings and output: a vocabulary without weights"]


def test_a_folder_of_an_adapter_is_named(tmp_path: Path) -> None:
    tmp_path.joinpath("adapter_config.json").write_text("{}")
    tmp_path.joinpath("adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedFormatError, match=r"holds an adapter \(LoRA\).*Merge it into its base model"):
        verify_model(str(tmp_path))


def test_a_file_that_is_no_model_or_has_no_sound_vocabulary_is_a_finding(tmp_path: Path) -> None:
    adapter = edited(small_llama(tmp_path), tmp_path / "adapter.gguf", settings={"general.type": "adapter"})
    ((check, is_error, message),) = found(adapter)
    assert (check, is_error) == ("model", True) and "adapter.gguf is an adapter" in message
    tokens = ["a", "b", "a", *map(str, range(37))]
    settings = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens}
    twice = edited(small_llama(tmp_path), tmp_path / "twice.gguf", settings=settings)
    ((check, is_error, message),) = found(twice)
    assert (check, is_error) == ("tokenizer", False) and "entries 0 and 2 are both 'a'" in message
    settings["tokenizer.ggml.tokens"] = tokens[3:]
    few = edited(small_llama(tmp_path), tmp_path / "few.gguf", settings=settings)
    ((check, is_error, message),) = found(few)
    assert (check, is_error) == ("model", True) and "has 37 entries; wanted the 40 rows" in message


@pytest.mark.parametrize("value", [[1, 2], ["a", "b"], 3.5])
def test_settings_of_any_type_are_findings_or_nothing(value: Any, tmp_path: Path) -> None:
    odd = dict.fromkeys(("general.type", "general.base_model.0.name", "tokenizer.ggml.model", TEMPLATE), value)
    result = verify_model(str(edited(demo(), tmp_path / "odd.gguf", settings=odd)))
    assert result.findings == [] and "does not build those of the kind" in result.unchecked[0]
    nameless = edited(demo(), tmp_path / "nameless.gguf", settings={"general.architecture": value})
    assert found(nameless)[0][:2] == ("model", True)


def test_the_command_prints_findings_and_ends_with_one(tmp_path: Path) -> None:
    run = CliRunner().invoke
    good = run(localinfer_command, ["show", str(demo()), "--verify", "--json"])
    assert good.exit_code == 0 and json.loads(good.stdout)["verification"] == {"findings": [], "unchecked": []}
    changes = {"blk.2.ffn_down.weight": one_value(np.nan, 31)}
    broken = str(edited(small_llama(tmp_path), tmp_path / "broken.gguf", changes=changes))
    result = run(localinfer_command, ["show", broken, "--verify"])
    assert result.exit_code == 1
    assert "\nverification\n  error    weights not finite: blk.2.ffn_down.weight has 1 values" in result.stdout
    assert "\n  not done vocabulary and chat template: there is none" in result.stdout
    (finding,) = json.loads(run(localinfer_command, ["show", broken, "--verify", "--json"]).stdout)["verification"][
        "findings"
    ]
    assert finding["check"] == "weights not finite" and finding["is_error"] is True
