"""Configurations of mmproj files: keys that are read, defaults, and what is refused by name."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from localinfer.errors import CorruptFileError, UnsupportedFormatError
from localinfer.models.media.mmproj import PICTURE_PROJECTORS, SOUND_PROJECTORS, read_media_config

Metadata = dict[str, Any]


def picture_metadata(projector: str, **changes: object) -> Metadata:
    keys: Metadata = {
        "clip.has_vision_encoder": True,
        "clip.vision.projector_type": projector,
        "clip.use_gelu": True,
    }
    keys |= {
        f"clip.vision.{key}": value
        for key, value in {
            "image_size": 56,
            "patch_size": 14,
            "embedding_length": 48,
            "feed_forward_length": 96,
            "block_count": 3,
            "projection_dim": 64,
            "attention.head_count": 3,
            "attention.layer_norm_epsilon": 1e-6,
            "image_mean": np.array([0.5, 0.5, 0.5], np.float32),
            "image_std": np.array([0.5, 0.25, 0.5], np.float32),
            "n_wa_pattern": 4,
            "swiglu_clamp": 7.0,
            "image_min_pixels": 3000,
            "image_max_pixels": 60000,
        }.items()
    }
    return keys | {key.replace("__", "."): value for key, value in changes.items()}


def sound_metadata(projector: str) -> Metadata:
    return {
        "clip.has_audio_encoder": True,
        "clip.audio.projector_type": projector,
        "clip.audio.embedding_length": 48,
        "clip.audio.feed_forward_length": 96,
        "clip.audio.block_count": 2,
        "clip.audio.projection_dim": 64,
        "clip.audio.attention.head_count": 3,
        "clip.audio.attention.layer_norm_epsilon": 1e-5,
        "clip.audio.num_mel_bins": 80,
    }


def output_shapes(projector: str) -> dict[str, tuple[int, ...]]:
    kind = {**PICTURE_PROJECTORS, **SOUND_PROJECTORS}[projector]
    return {kind.output: (48, 64) if kind.is_transposed else (64, 48)}


@pytest.mark.parametrize("projector", PICTURE_PROJECTORS)
def test_a_picture_encoder_is_read(projector: str) -> None:
    config = read_media_config(picture_metadata(projector), output_shapes(projector))
    picture = config.picture
    assert config.sound is None and picture is not None
    assert (picture.projector, picture.output_size, picture.num_heads, picture.head_size) == (projector, 64, 3, 16)
    assert (picture.std, picture.activation) == ((0.5, 0.25, 0.5), "gelu")
    assert picture.merge == PICTURE_PROJECTORS[projector].merge


@pytest.mark.parametrize("projector", SOUND_PROJECTORS)
def test_a_sound_encoder_is_read(projector: str) -> None:
    config = read_media_config(sound_metadata(projector), output_shapes(projector))
    assert config.picture is None and config.sound is not None
    assert (config.sound.projector, config.sound.num_mel_bins, config.sound.output_size) == (projector, 80, 64)


def test_one_name_can_stand_for_both() -> None:
    metadata = picture_metadata("") | sound_metadata("") | {"clip.projector_type": "qwen2.5o"}
    config = read_media_config(metadata, output_shapes("qwen2.5vl_merger") | output_shapes("qwen2a"))
    assert config.picture is not None and config.picture.projector == "qwen2.5vl_merger"
    assert config.sound is not None and config.sound.projector == "qwen2a"


def test_merge_factors_pinpoints_and_deepstack_come_from_the_file() -> None:
    metadata = picture_metadata(
        "qwen3vl_merger",
        clip__vision__spatial_merge_size=3,
        clip__vision__image_grid_pinpoints=np.array([56, 112, 112, 56], np.int32),
        clip__vision__feature_layer=np.array([1, 3], np.int32),
    )
    shapes = output_shapes("qwen3vl_merger") | {"v.deepstack.1.norm.weight": (48,), "v.deepstack.2.norm.weight": (48,)}
    picture = read_media_config(metadata, shapes).picture
    assert picture is not None
    assert (picture.merge, picture.num_deepstack, picture.feature_layers) == (3, 2, (1, 3))
    assert picture.pinpoints == ((56, 112), (112, 56))


def test_no_activation_key_means_quick() -> None:
    metadata = picture_metadata("mlp")
    del metadata["clip.use_gelu"]
    picture = read_media_config(metadata, output_shapes("mlp")).picture
    assert picture is not None and picture.activation == "quick"


@pytest.mark.parametrize(("version", "num_queries"), [(None, 96), (2, 96), (3, 64), (6, 64), (100045, 64)])
def test_rows_of_a_resampler_follow_from_its_version(version: int | None, num_queries: int) -> None:
    metadata = picture_metadata("resampler") | ({"clip.minicpmv_version": version} if version else {})
    picture = read_media_config(metadata, output_shapes("resampler")).picture
    assert picture is not None and (picture.minicpmv_version, picture.num_queries) == (version or 0, num_queries)
    metadata["clip.minicpmv_query_num"] = 16
    picture = read_media_config(metadata, output_shapes("resampler")).picture
    assert picture is not None and picture.num_queries == 16


def test_pictures_see_themselves_in_gemma_only() -> None:
    config = read_media_config(picture_metadata("gemma4v"), output_shapes("gemma4v"))
    assert config.sees_itself(2048) and not config.sees_itself(1536)
    assert config.picture is not None
    other = dataclasses.replace(config, picture=dataclasses.replace(config.picture, projector="mlp"))
    assert not other.sees_itself(2048)


def test_an_unknown_projector_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedFormatError, match=r"projector_type is 'cogvlm'.*gemma3") as raised:
        read_media_config(picture_metadata("cogvlm"), {})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clip__has_vision_encoder": False}, "both false or missing"),
        ({"clip__vision__projector_type": ""}, "projector_type is missing"),
        ({"clip__use_silu": True}, r"use_gelu is true beside clip\.use_silu"),
        ({"clip__vision__embedding_length": 0}, "embedding_length is 0"),
        ({"clip__vision__attention.head_count": 5}, "head_count is 5"),
        ({"clip__vision__image_std": np.array([0.5, 0.0, 0.5], np.float32)}, "image_std is 0"),
        ({"clip__vision__image_mean": np.array([0.5, np.nan, 0.5], np.float32)}, "image_mean"),
        ({"clip__vision__feature_layer": np.array([4], np.int32)}, "feature_layer is 4"),
        ({"clip__vision__image_grid_pinpoints": np.array([4], np.int32)}, "image_grid_pinpoints is an array of 1"),
        ({"clip__vision__patch_size": 1 << 40}, "patch_size"),
        ({"clip__vision__block_count": 0}, "block_count is 0"),
        ({"clip__vision__feed_forward_length": 0}, "feed_forward_length is 0"),
        ({"clip__vision__attention.head_count_kv": 2}, "head_count_kv is 2; wanted a divisor of 3"),
        ({"clip__vision__attention.head_dim": 2048}, "head_dim is 2048"),
    ],
)
def test_a_wrong_key_is_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(CorruptFileError, match=message):
        read_media_config(picture_metadata("mlp", **changes), output_shapes("mlp"))


@pytest.mark.parametrize(("projector", "key"), [("qwen2.5vl_merger", "n_wa_pattern"), ("glm5v", "swiglu_clamp")])
def test_a_required_key_is_missed(projector: str, key: str) -> None:
    metadata = picture_metadata(projector)
    del metadata[f"clip.vision.{key}"]
    with pytest.raises(CorruptFileError, match=f"{key} is missing"):
        read_media_config(metadata, output_shapes(projector))


def test_a_missing_projector_tensor_is_named() -> None:
    with pytest.raises(CorruptFileError, match=r"'mm\.2\.weight' is missing"):
        read_media_config(picture_metadata("mlp"), {})
