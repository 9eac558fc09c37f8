"""Rules of pictures beyond the fixtures: settings of other files, limits, texts of other versions, and refusals.

The check sums are of what llama.cpp's own preprocessing made of the same pixels with the same settings.
"""

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from localinfer.errors import CorruptFileError, RequestError, ShapeError, UnsupportedFormatError
from localinfer.models.media.mmproj import MediaConfig, PictureConfig
from localinfer.models.media.picture_layouts import (
    PICTURE_FAMILIES,
    InputSize,
    count_rows,
    lay_out,
    outline,
    takes_limits,
)
from localinfer.models.media.records import EncoderInput, PreparedMedia
from localinfer.models.media.resizing import Fit, resize, smart_size, stretch

BASE = PictureConfig(
    projector="",
    hidden_size=48,
    intermediate_size=96,
    num_layers=3,
    num_heads=3,
    norm_epsilon=1e-6,
    merge=2,
    output_size=64,
    num_deepstack=0,
    image_size=56,
    patch_size=14,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    activation="gelu",
    num_kv_heads=3,
    head_size=16,
    feature_layers=(),
    window_pattern=0,
    window_layer=0,
    pinpoints=(),
    preproc_image_size=0,
    min_tiles=1,
    max_tiles=12,
    min_pixels=0,
    max_pixels=0,
    minicpmv_version=3,
    num_queries=64,
    swiglu_clamp=0.0,
    has_image_break=False,
)
AREAS = {"min_pixels": 7000, "max_pixels": 60_000}
PINPOINTS = {"image_size": 48, "patch_size": 16, "merge": 1, "pinpoints": ((96, 48), (48, 96), (144, 48))}
PEERS: list[tuple[str, dict[str, Any], tuple[int | None, int | None], tuple[int, int], tuple[int, int], list[int]]] = [
    # Family, settings, user's limits, size; then the size of the whole, and sums of tiles and of the whole.
    (
        *("idefics3", {}, (None, None), (97, 150), (56, 56)),
        [2892173016, 3909074313, 2723040841, 480418884, 2195803004, 1080720897, 3713614615],
    ),
    (
        *("idefics3", {"preproc_image_size": 168}, (8, 40), (301, 77), (56, 56)),
        [1931704970, 277815810, 4034709857, 2792580384, 3219270622],
    ),
    ("lightonocr", {"preproc_image_size": 196}, (4, 12), (211, 97), (140, 56), [383281176]),
    ("glm5v", AREAS, (None, 20), (333, 150), (168, 84), [3796530938]),
    ("glm5v", AREAS, (None, None), (31, 45), (84, 112), [2601370069]),
    ("kimik25", {}, (6, None), (45, 31), (84, 84), [3125591827]),
    (
        *("internvl", {"min_tiles": 2, "max_tiles": 5}, (None, None), (171, 90), (56, 56)),
        [201549863, 2339293854, 2461657711, 1541369838, 647585443],
    ),
    ("mlp", PINPOINTS, (None, None), (150, 61), (48, 48), [1231034814, 1131822779, 1312977429, 916129165]),
    # So thin that no candidate keeps a pixel of it.
    ("mlp", PINPOINTS, (None, None), (400, 2), (48, 48), [1999459775, 2180453442, 2418776734]),
    ("resampler", {"image_size": 70, "merge": 1}, (None, None), (140, 95), (84, 56), [916111146, 636279614, 692695558]),
    ("minicpmv4_6", {"image_size": 112}, (None, None), (200, 60), (196, 56), [3906184694]),
    ("lfm2", {"patch_size": 8}, (4, 12), (100, 33), (96, 32), [4087371074]),
    (
        *("lfm2", {"patch_size": 8}, (4, 20), (130, 97), (80, 48)),
        [3656384825, 1078986402, 2673488705, 3956983323, 3295544924, 2237191077, 2112837188],
    ),
    ("llama4", {}, (None, None), (150, 20), (56, 56), [1434687330, 3941318511, 3273335405, 1808590471]),
]


def config(projector: str, *, has_mrope: bool = False, **settings: Any) -> MediaConfig:
    return MediaConfig(replace(BASE, projector=projector, **settings), None, has_mrope)


def noise(width: int, height: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng([width, height]).integers(0, 256, (height, width, 3), np.uint8)


def inputs_of(media: PreparedMedia) -> list[EncoderInput]:
    return [piece for piece in media.pieces if isinstance(piece, EncoderInput)]


def texts_of(pieces: Any) -> list[str]:
    return [piece for piece in pieces if isinstance(piece, str)]


@pytest.mark.parametrize(("projector", "settings", "limits", "size", "whole", "sums"), PEERS)
def test_other_settings_give_llama_cpps_bytes(
    projector: str,
    settings: dict[str, Any],
    limits: tuple[int | None, int | None],
    size: tuple[int, int],
    whole: tuple[int, int],
    sums: list[int],
) -> None:
    low, high = limits
    inputs = inputs_of(lay_out(noise(*size), config(projector, **settings), min_tokens=low, max_tokens=high))
    if PICTURE_FAMILIES[projector].tile_texts.has_overview_first:
        inputs = [*inputs[1:], inputs[0]]
    assert inputs[-1].values.shape == (whole[1], whole[0], 3)
    assert [zlib.crc32(one.values.tobytes()) for one in inputs] == sums


@pytest.mark.parametrize("projector", PICTURE_FAMILIES)
def test_sizes_alone_say_what_a_picture_becomes(projector: str) -> None:
    rng = np.random.default_rng(4)
    for has_mrope in (False, True):
        settings = config(projector, has_mrope=has_mrope, preproc_image_size=112, **AREAS)
        for _ in range(6):
            width, height = (int(side) for side in rng.integers(1, 200, 2))
            media = lay_out(noise(width, height), settings)
            pieces = outline(width, height, settings)
            found = [
                InputSize(piece.values.shape[1], piece.values.shape[0], piece.num_rows, piece.grid, piece.num_positions)
                if isinstance(piece, EncoderInput)
                else piece
                for piece in media.pieces
            ]
            assert found == pieces
            assert count_rows(width, height, settings) == sum(one.num_rows for one in inputs_of(media))
            assert all((one.grid is not None) == has_mrope for one in inputs_of(media))


def test_families_without_a_grid_stand_in_a_line_under_mrope() -> None:
    (with_grid,) = inputs_of(lay_out(noise(90, 90), config("glm4v", has_mrope=True)))
    assert (with_grid.grid, with_grid.num_rows, with_grid.num_positions) == ((3, 3), 9, 3)
    (line,) = inputs_of(lay_out(noise(90, 90), config("kimivl", has_mrope=True)))
    assert line.grid == (1, line.num_rows) and line.num_positions == line.num_rows


def test_breaks_between_rows_are_rows() -> None:
    plain, broken = (outline(300, 100, config("pixtral", has_image_break=has_break)) for has_break in (False, True))
    assert isinstance(plain[0], InputSize) and isinstance(broken[0], InputSize)
    assert broken[0].num_rows - plain[0].num_rows == plain[0].height // 28 - 1


def test_texts_of_minicpm_depend_on_its_version() -> None:
    tiled = {version: outline(100, 60, config("resampler", merge=1, minicpmv_version=version)) for version in (0, 2, 6)}
    assert tiled[0] == tiled[2]
    old = ["<image>", "</image>", "<slice>", *["<image>", "</image>"] * 2, "</slice>"]
    assert texts_of(tiled[2]) == old
    assert texts_of(tiled[6]) == ["<image>", "</image>", *["<slice>", "</slice>"] * 2]
    with pytest.raises(UnsupportedFormatError, match=r"clip\.minicpmv_version is 7.*wanted one of 0, 2, 3"):
        outline(100, 60, config("resampler", minicpmv_version=7))


def test_rows_of_tiles_end_with_a_line_but_the_last() -> None:
    texts = texts_of(outline(150, 150, config("idefics3", preproc_image_size=112)))
    name = "<fake_token_around_image><row_{}_col_{}>"
    tiles = [name.format(1, 1), name.format(1, 2), "\n", name.format(2, 1), name.format(2, 2)]
    assert texts == [*tiles, "\n\n", "<fake_token_around_image>", "<global-img>", "<fake_token_around_image>"]


def test_marks_depend_on_the_vocabulary_where_a_family_has_several() -> None:
    settings = config("kimik25", **AREAS)
    assert texts_of(outline(60, 60, settings)) == ["<|media_begin|>", "<|media_end|>"]
    known = {"<|begin_of_image|>"}
    texts = texts_of(outline(60, 60, settings, has_token=lambda text: text in known))
    assert texts == ["<|begin_of_image|>", "<|end_of_image|>"]
    known.clear()
    assert texts_of(outline(60, 60, settings, has_token=lambda text: text in known)) == texts_of(
        outline(60, 60, settings)
    )


def test_limits_are_obeyed_where_the_family_takes_them() -> None:
    for projector, family in PICTURE_FAMILIES.items():
        settings = config(projector, preproc_image_size=112, **AREAS)
        assert settings.picture is not None
        few = count_rows(500, 500, settings, min_tokens=1, max_tokens=9)
        assert takes_limits(settings.picture) == (few != count_rows(500, 500, settings)), projector
        assert family.takes_limits or not takes_limits(settings.picture)
        free = config(projector, **(AREAS if family.needs_limits else {}))
        assert free.picture is not None
        assert takes_limits(free.picture) == family.takes_limits


@pytest.mark.parametrize(
    ("low", "high", "words", "field"),
    [
        (0, None, "image_min_tokens is 0; wanted a number of embeddings above 0", "image_min_tokens"),
        (None, -3, "image_max_tokens is -3", "image_max_tokens"),
        (20, 10, "at least 20 and at most 10 embeddings", "image_min_tokens"),
        (None, 4, "at least 8 and at most 4 embeddings", "image_max_tokens"),
    ],
)
def test_limits_that_exclude_every_picture_are_refused(
    low: int | None, high: int | None, words: str, field: str
) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        outline(50, 50, config("qwen2vl_merger"), min_tokens=low, max_tokens=high)
    assert caught.value.field == field


def test_files_whose_settings_contradict_each_other_are_refused() -> None:
    with pytest.raises(UnsupportedFormatError, match="image_grid_pinpoints has sizes that are no multiples"):
        outline(100, 50, config("mlp", pinpoints=((112, 60),)))
    with pytest.raises(CorruptFileError, match="image_max_pixels is 0"):
        outline(100, 50, config("phi4"))
    with pytest.raises(RequestError, match="no encoder of pictures"):
        outline(100, 50, MediaConfig(None, None))


def test_pictures_that_are_none_are_refused() -> None:
    for picture in (np.zeros((4, 4), np.uint8), np.zeros((4, 4, 3)), np.zeros((0, 4, 3), np.uint8)):
        with pytest.raises(ShapeError, match=r"wanted uint8 \[height, width, 3\]"):
            lay_out(picture, config("gemma3"))


def test_shapes_that_would_grow_without_bound_are_refused() -> None:
    with pytest.raises(RequestError, match="would be resized to .* pixels for this model"):
        outline(1, 60_000, config("kimik25"), min_tokens=4000)
    with pytest.raises(RequestError, match="no pixels in one direction"):
        outline(2000, 10, config("idefics3", preproc_image_size=168))
    with pytest.raises(RequestError, match="wanted sides of 1 to 65536"):
        Fit((5, 5), (20_000, 20_000), (0, 0), "bicubic")


@pytest.mark.parametrize("filter", ["bilinear", "bicubic", "lanczos"])
def test_large_pictures_are_resized_in_stripes_to_the_same_bytes(filter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = noise(90, 70)
    whole = [resize(picture, size, filter) for size in ((31, 20), (140, 200), (90, 33), (41, 70))]
    monkeypatch.setattr("localinfer.models.media.resizing._PIXELS_A_STRIPE", 500)
    again = [resize(picture, size, filter) for size in ((31, 20), (140, 200), (90, 33), (41, 70))]
    assert all(np.array_equal(one, other) for one, other in zip(whole, again, strict=True))


def test_an_equal_size_is_a_copy_without_a_filter() -> None:
    picture = noise(20, 30)
    assert np.array_equal(stretch((20, 30), "lanczos").apply(picture), picture)


def test_smart_sizes_are_multiples_within_their_limits_but_for_thin_pictures() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        source = int(rng.integers(1, 3000)), int(rng.integers(1, 3000))
        width, height = smart_size(source, 28, 8 * 784, 1024 * 784)
        assert width % 28 == height % 28 == 0
        assert width * height >= 8 * 784
        assert width * height <= 1024 * 784 or min(width, height) == 28


@pytest.mark.parametrize("projector", ["gemma3", "mlp", "internvl", "llama4", "janus_pro"])
def test_a_picture_without_a_patch_is_the_files_fault(projector: str) -> None:
    with pytest.raises(CorruptFileError, match="no patch of"):
        count_rows(40, 30, config(projector, image_size=3))
