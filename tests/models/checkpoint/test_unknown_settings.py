"""Settings that change results and are not understood are named, and no others."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import localinfer
from localinfer.apps.quantize import quantize
from localinfer.apps.show.describe import describe_file, render_text
from localinfer.errors import UnsupportedFormatError
from localinfer.generation.embedding_inputs import TextRules
from localinfer.loading.options import model_path
from localinfer.models import demo
from localinfer.models.checkpoint.model import open_checkpoint
from localinfer.models.decoder.architectures import ARCHITECTURES, find_architecture
from localinfer.models.decoder.block_config import OF_ANOTHER_CACHE, classified_rows, read_pooling
from localinfer.models.decoder.config import ModelConfig
from localinfer.models.decoder.metadata_keys import ARCHITECTURE_KEYS, READ_KEYS, unknown_keys, unknown_settings
from localinfer.models.load.loader import load_model
from localinfer.models.load.model_changes import ModelChanges
from localinfer.quant.gguf.reader import read_gguf
from tests.models.arch_models import skeletons
from tests.models.checkpoint.family_folders import SETTINGS, family_config, write_family
from tests.models.small_models import write_small_llama

RUNNING = {*ARCHITECTURES, *OF_ANOTHER_CACHE}


class Watched(dict[str, object]):
    """Metadata that notes which keys are asked for."""

    def __init__(self, values: dict[str, object]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: object = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> object:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


def fixtures() -> dict[str, dict[str, Any]]:
    """The fixtures whose architectures run, alone or beside another."""
    return {name: found for name, found in skeletons().items() if found["arch"] in RUNNING}


def metadata_of(skeleton: dict[str, Any]) -> dict[str, object]:
    return {"general.architecture": skeleton["arch"], **{key: value for key, _, _, value in skeleton["kv"]}}


def test_no_fixture_raises_an_alarm_and_all_keys_read_are_listed() -> None:
    asked: dict[str, set[str]] = {}
    for name, skeleton in fixtures().items():
        assert unknown_keys(metadata_of(skeleton), skeleton["arch"]) == [], name
        watched = Watched(metadata_of(skeleton))
        config = ModelConfig.from_metadata(watched, {tensor: tuple(shape) for tensor, shape in skeleton["tensors"]})
        if skeleton["arch"] in ARCHITECTURES:
            find_architecture(config)
        read_pooling(watched)
        classified_rows(watched, is_encoder=config.is_encoder)
        prefix = f"{skeleton['arch']}."
        found = asked.setdefault(skeleton["arch"], set())
        found |= {key.removeprefix(prefix) for key in watched.asked if key.startswith(prefix)}
    for architecture in RUNNING:
        # Of texts that are embedded, which the application reads.
        watched = Watched({"general.architecture": architecture, f"{architecture}.late_interaction": True})
        TextRules.of_model(watched)
        prefix = f"{architecture}."
        read = {key.removeprefix(prefix) for key in watched.asked if key.startswith(prefix)}
        asked.setdefault(architecture, set()).update(read)
    together = set().union(*asked.values())
    assert together == READ_KEYS | set(ARCHITECTURE_KEYS), "the lists hold what is read, and nothing else"
    for key, users in ARCHITECTURE_KEYS.items():
        assert set(users) <= RUNNING, key


def test_models_that_ship_raise_no_alarm() -> None:
    for path in (model_path(None), Path(demo.__file__).parent / "demo-q4_k_m.gguf"):
        with read_gguf(path) as file:
            assert unknown_settings(file) == []


@pytest.mark.parametrize(
    ("key", "value", "is_named"),
    [
        ("llama.rope.scaling.alpha", 2.0, True),
        ("llama.rope.scaling.magic_factor", 3.0, True),
        ("llama.attention.clamp_kqv", 8.0, True),
        ("llama.attention.value_scale", [0.5, 0.5], True),
        ("llama.logit_scale", 0.5, True),
        ("llama.hidden_activation", "relu", True),
        ("llama.attention.clamp_kqv", 0.0, False),
        ("llama.attention.value_scale", [0.0, 0.0], False),
        ("llama.logit_scale", 1.0, False),
        ("llama.tensor_data_layout", "Meta AI original pth", False),
        ("qwen9.rope.scaling.alpha", 2.0, False),
        ("general.author", "me", False),
    ],
)
def test_keys_of_the_architecture_are_named_unless_they_are_known_to_change_nothing(
    key: str, value: object, is_named: bool
) -> None:
    assert unknown_keys({"general.architecture": "llama", key: value}, "llama") == ([key] if is_named else [])


def test_all_unknown_keys_are_told_once_when_loading_and_in_show(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_small_llama(tmp_path / "model.gguf", extra={"attention.clamp_kqv": 8.0, "rope.scaling.alpha": 1e3})
    with caplog.at_level(logging.WARNING):
        load_model(path, threads=1).close()
    messages = [record.getMessage() for record in caplog.records]
    told = [message for message in messages if "settings unknown to this version" in message]
    assert len(told) == 1
    assert "llama.attention.clamp_kqv, llama.rope.scaling.alpha" in told[0]
    description = describe_file(str(path))
    assert description.unknown_settings == ["llama.attention.clamp_kqv", "llama.rope.scaling.alpha"]
    line = next(line for line in render_text(description, tensors=False).splitlines() if "not understood" in line)
    assert "llama.attention.clamp_kqv, llama.rope.scaling.alpha" in line


def test_key_that_controls_a_terminal_is_told_in_plain_letters(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_small_llama(tmp_path / "model.gguf", extra={"rope.\x1b[2J": 1.0})
    load_model(path, threads=1).close()
    assert "\x1b" not in caplog.text and "x1b[2J" in caplog.text


def test_model_that_sees_what_comes_after_is_refused(tmp_path: Path) -> None:
    path = write_small_llama(tmp_path / "model.gguf", extra={"attention.causal": False})
    with pytest.raises(UnsupportedFormatError, match=r"llama\.attention\.causal is false"):
        load_model(path, threads=1)


@pytest.mark.parametrize("model_type", SETTINGS)
def test_folder_with_the_settings_of_published_ones_raises_no_alarm(model_type: str, tmp_path: Path) -> None:
    with open_checkpoint(write_family(tmp_path, model_type)) as file:
        assert unknown_settings(file) == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"embedding_multiplier": 12.0}, ["embedding_multiplier"]),
        ({"use_qk_norm": True, "attn_temperature_tuning": 4}, ["attn_temperature_tuning", "use_qk_norm"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 1000.0}}, ["rope_scaling.alpha"]),
        ({"attn_logit_softcapping": 50.0}, ["attn_logit_softcapping"]),
        ({"embedding_multiplier": 1.0, "use_qk_norm": False, "residual_multiplier": None}, []),
        ({"my_favourite_colour": "red", "unsloth_version": "2025.1"}, []),
    ],
)
def test_settings_of_a_folder_that_change_results_are_named(
    changes: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    folder = write_family(tmp_path, "llama")
    (folder / "config.json").write_text(json.dumps({**family_config("llama"), **changes}))
    assert describe_file(str(folder)).unknown_settings == named


def test_settings_that_a_quantized_file_cannot_hold_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_family(tmp_path / "folder", "llama")
    (folder / "config.json").write_text(json.dumps({**family_config("llama"), "embedding_multiplier": 12.0}))
    quantize(folder, tmp_path / "model.gguf", type="Q8_0", threads=1)
    assert "will not be in the new file: embedding_multiplier" in caplog.text


def test_windows_in_a_family_that_has_none_are_refused(tmp_path: Path) -> None:
    folder = write_family(tmp_path, "qwen3")
    changes = {"layer_types": ["sliding_attention", "full_attention"]}
    (folder / "config.json").write_text(json.dumps({**family_config("qwen3"), **changes}))
    with pytest.raises(UnsupportedFormatError, match="layer_types"):
        open_checkpoint(folder)


def test_value_set_by_the_caller_counts_as_that_of_the_file(caplog: pytest.LogCaptureFixture) -> None:
    changes = ModelChanges(overrides={"llama.rope.scale_linear": 2.0})
    load_model(model_path(None), threads=1, changes=changes).close()
    assert "settings unknown to this version" not in caplog.text
    with localinfer.load(overrides={"llama.rope.scale_linear": 2.0}, speculation=None) as llm:
        assert llm.complete("Once", max_tokens=1).token_ids
