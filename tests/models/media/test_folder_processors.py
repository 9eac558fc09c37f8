"""Processors of folders make what transformers makes: pixels, features, tokens, positions, from files of all forms."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, RequestError, UnsupportedFormatError
from localinfer.models.checkpoint.tokenizer_json import read_tokenizer
from localinfer.models.media.cuts import BICUBIC, BILINEAR, resize_as_pillow, resize_as_torch
from localinfer.models.media.folder_media import media_families
from localinfer.models.media.folder_pictures import OVIS_MARKS, PICTURE_FAMILIES
from localinfer.models.media.folder_processors import (
    PictureProcessor,
    expand,
    picture_processor,
    sound_processor,
)
from localinfer.models.media.folder_settings import JsonFolder, read_processor_settings
from localinfer.models.media.folder_sounds import SOUND_FAMILIES, SoundProcessor
from localinfer.models.media.records import EncoderInput, PreparedMedia
from localinfer.models.text.chat_template import ChatTemplate
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.quant.checkpoint.folder import open_folder
from tests.models.media.conftest import Folder, MediaFolders

TILED = (
    "aya_vision clip cohere2_vision colpali gemma3 idefics3 internvl lighton_ocr llama4 llava llava_next"
    " llava_onevision ministral3 mistral3 ovis2 paligemma pixtral siglip smolvlm"
).split()
BLOCKS = (
    "colqwen2 glm4v glm4v_moe glm_ocr qwen2_5_omni qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe qwen3_vl"
    " qwen3_vl_moe"
).split()
PATCHES = ["kimi_k25", "paddleocr_vl"]
NAFLEX = ["gemma4", "lfm2_vl", "siglip2"]
SEE = sorted([*TILED, *BLOCKS, *PATCHES, *NAFLEX, "minicpmv4_6"])
HEAR = "gemma4 granite_speech qwen2_5_omni qwen2_audio qwen3_omni_moe voxtral".split()
VARIANTS: dict[str, dict[str, Any]] = {
    "": {},
    "pan": {
        "do_pan_and_scan": True,
        "pan_and_scan_min_crop_size": 16,
        "pan_and_scan_max_num_crops": 4,
        "pan_and_scan_min_ratio_to_activate": 1.2,
    },
    "whole": {"do_image_splitting": False},
}
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def read_picture_processor(folder: JsonFolder) -> PictureProcessor:
    return picture_processor(read_processor_settings(folder))


def folder_kinds(folder: JsonFolder) -> tuple[bool, bool]:
    seeing, hearing = media_families(folder, read_processor_settings(folder))
    return seeing is not None, hearing is not None


def read_sound_processor(folder: JsonFolder) -> SoundProcessor:
    return sound_processor(read_processor_settings(folder))


def _error(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    assert found.shape == wanted.shape
    difference = found.astype(np.float64) - wanted
    return float(np.square(difference).sum() / np.square(wanted.astype(np.float64)).sum())


def _inputs(media: PreparedMedia) -> list[EncoderInput]:
    return [piece for piece in media.pieces if isinstance(piece, EncoderInput)]


def _pixels(processor: PictureProcessor, media: PreparedMedia) -> list[NDArray[np.float32]]:
    """Normalised pictures of all inputs, [3, height, width]; the tiles of one input apart."""
    found = []
    for entry in _inputs(media):
        values = (entry.values.astype(np.float32) / 255 - np.float32(processor.mean)) / np.float32(processor.std)
        planes = values.transpose(2, 0, 1).astype(np.float32)
        side = len(found[0][0]) if entry.kept is not None else 0
        if not side:
            found.append(planes)
            continue
        tops, lefts = range(0, planes.shape[1], side), range(0, planes.shape[2], side)
        found += [planes[:, top : top + side, left : left + side] for top in tops for left in lefts]
    return found


def _patches(planes: NDArray[np.float32], patch: int, merge: int) -> NDArray[np.float32]:
    """[patches, 3, patch, patch], in the order of blocks of merge x merge."""
    down, across = planes.shape[1] // patch // merge, planes.shape[2] // patch // merge
    return (
        planes.reshape(3, down, merge, patch, across, merge, patch)
        .transpose(1, 4, 2, 5, 0, 3, 6)
        .reshape(-1, 3, patch, patch)
    )


def _as_reference(name: str, pixels: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Pixels in the form that a family's processor returns."""
    patch = 16 if name.startswith("qwen3") or name in NAFLEX else 14
    if name in BLOCKS:
        blocks = np.concatenate([_patches(planes, patch, 2) for planes in pixels])
        return np.repeat(blocks[:, :, None], 2, axis=2).reshape(len(blocks), -1)
    if name in PATCHES:
        return np.concatenate([_patches(planes, patch, 1) for planes in pixels])
    if name in NAFLEX:
        length = {"gemma4": 630, "lfm2_vl": 48, "siglip2": 20}[name]
        rows = [_patches(planes, patch, 1).transpose(0, 2, 3, 1).reshape(-1, 3 * patch**2) for planes in pixels]
        return np.concatenate([np.pad(one, ((0, length - len(one)), (0, 0))) for one in rows])
    if name == "minicpmv4_6":
        return np.concatenate(
            [_patches(planes, patch, 1).transpose(1, 2, 0, 3).reshape(3, patch, -1) for planes in pixels], -1
        )
    return np.stack(pixels)


@pytest.mark.parametrize("name", SEE)
def test_pixels_are_the_references(media_folders: MediaFolders, name: str) -> None:
    reference = media_folders.reference(name)
    for variant, settings in VARIANTS.items():
        if not any(key.startswith(f"picture0{variant}.") for key in reference):
            continue
        processor = read_picture_processor(Folder.read(media_folders.path(name), **settings))
        for number in range(3):
            media = processor.lay_out(media_folders.picture(name, number))
            found = _as_reference(name, _pixels(processor, media))
            key = f"picture{number}{variant}.pixel_values"
            wanted = reference.get(key)
            if wanted is None:
                wanted, found = reference[f"{key}_every8"], found.reshape(-1, found.shape[-1])[::8]
            # Llama 4's are rounded to bfloat16 on the way.
            limit = 4e-5 if name == "llama4" else 1e-12
            assert _error(found.reshape(wanted.shape), wanted) < limit
            height, width = media_folders.picture(name, number).shape[:2]
            assert processor.count_rows(width, height) == sum(entry.num_rows for entry in _inputs(media))
            grids = reference.get(f"picture{number}{variant}.image_grid_thw")
            if grids is not None and _inputs(media)[0].grid is not None:
                assert [tuple(grids[0, 1:] // 2)] == [entry.grid for entry in _inputs(media)]


def _placeholders(name: str, entry: EncoderInput, tokenizer: Tokenizer, placeholder: int) -> list[int]:
    """What the reference has in place of an input's rows."""
    if any(entry.marks):
        before, behind = ([tokenizer.token_id(OVIS_MARKS[mark]) for mark in marks] for marks in entry.marks)
        found = [*before, *[placeholder] * (entry.num_rows - len(before) - len(behind)), *behind]
        return [one for one in found if one is not None]
    if name not in ("mistral3", "ministral3", "pixtral") or entry.is_sound:
        return [placeholder] * entry.num_rows
    unit = 14 if name == "pixtral" else 28
    end = tokenizer.token_id("[IMG_BREAK]")
    assert end is not None
    row = [*[placeholder] * (entry.values.shape[1] // unit), end]
    return (row * (entry.values.shape[0] // unit))[:-1]


def _ids_and_positions(
    name: str, pieces: Sequence[str | EncoderInput], tokenizer: Tokenizer, placeholder: int, adds_bos: bool
) -> tuple[list[int], NDArray[np.int64]]:
    ids: list[int] = []
    positions: list[tuple[int, int, int]] = []
    start = 0
    for index, piece in enumerate(["", *pieces] if isinstance(pieces[0], EncoderInput) else pieces):
        if isinstance(piece, str):
            found = tokenizer.encode(piece, index == 0 and adds_bos, parse_special=True)
        else:
            found = _placeholders(name, piece, tokenizer, placeholder)
            assert len(found) == piece.num_rows
        if isinstance(piece, EncoderInput) and piece.grid is not None:
            rows, columns = piece.grid
            positions += [(start, start + row, start + column) for row in range(rows) for column in range(columns)]
            start += piece.num_positions
        else:
            positions += [(start + offset,) * 3 for offset in range(len(found))]
            start += len(found)
        ids += found
    return ids, np.array(positions).T


def _tokenizer(path: Path) -> tuple[Tokenizer, Mapping[str, object]]:
    with open_folder(path) as folder:
        metadata = read_tokenizer(folder, folder.config.get("text_config", folder.config).get("vocab_size", 416))
    return Tokenizer.from_metadata(metadata), metadata


def _placeholder(config: Mapping[str, Any], kind: str) -> int:
    return int(config.get(f"{kind}_token_id", config.get(f"{kind}_token_index")))


@pytest.mark.parametrize(
    "name", [name for name in SEE if name not in ("clip", "siglip", "siglip2", "colpali", "colqwen2")]
)
def test_prompts_have_the_references_ids_and_positions(media_folders: MediaFolders, name: str) -> None:
    reference, path = media_folders.reference(name), media_folders.path(name)
    tokenizer, _ = _tokenizer(path)
    for label, numbers in (("one", (0,)), ("onepan", (0,)), ("onewhole", (0,)), ("two", (1, 2))):
        if f"{label}.prompt" not in reference:
            continue
        folder = Folder.read(path, **VARIANTS[label[3:]])
        processor = read_picture_processor(folder)
        media = [processor.lay_out(media_folders.picture(name, number), index) for index, number in enumerate(numbers)]
        prompt = processor.complete(str(reference[f"{label}.prompt"]))
        pieces = expand(prompt, [(processor.token, media)])
        placeholder = _placeholder(folder.config, "image")
        ids, positions = _ids_and_positions(name, pieces, tokenizer, placeholder, processor.adds_bos)
        assert ids == reference[f"{label}.input_ids"][0].tolist()
        wanted = reference[f"{label}.position_ids"].reshape(-1, len(ids))
        # PaliGemma counts from one, which turns queries and keys alike.
        assert np.array_equal(positions[: len(wanted)] + int(wanted[0, 0]), wanted)


@pytest.mark.parametrize("name", HEAR)
def test_features_and_ids_of_sounds_are_the_references(media_folders: MediaFolders, name: str) -> None:
    reference, path = media_folders.reference(name), media_folders.path(name)
    tokenizer, _ = _tokenizer(path)
    with open_folder(path) as folder:
        processor = read_sound_processor(folder)
        placeholder = _placeholder(folder.config, "audio")
    for label, text in (("heard", "Hear {} now"), ("heard-two", "Is {} or {} best?")):
        if f"{label}.input_ids" not in reference:
            continue
        media = [processor.lay_out(media_folders.sound(number)) for number in range(text.count("{}"))]
        pieces = expand(text.format(*[processor.alone] * 2), [(processor.token, media)])
        ids, _ = _ids_and_positions(name, pieces, tokenizer, placeholder, True)
        assert ids == reference[f"{label}.input_ids"][0].tolist()
        # What stands beside another in one call is filled up to it, there but not here.
        wanted = reference[f"{label}.input_features"][0]
        (entry,) = _inputs(media[0])
        wanted = wanted.T if len(wanted) == entry.values.shape[1] else wanted
        assert _error(entry.values, wanted[: len(entry.values)]) < 1e-10


@pytest.mark.parametrize(
    "name", sorted({*SEE, *HEAR} - {"clip", "siglip", "siglip2", "colpali", "colqwen2", "paligemma", "voxtral"})
)
def test_templates_write_what_stands_for_pictures_and_sounds(media_folders: MediaFolders, name: str) -> None:
    reference, path = media_folders.reference(name), media_folders.path(name)
    tokenizer, metadata = _tokenizer(path)
    sees, hears = ("one.prompt" in reference), ("heard.input_ids" in reference)
    parts = [*[{"type": "image"}] * sees, *[{"type": "audio"}] * hears, {"type": "text", "text": "What is in it?"}]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": [{"type": "text", "text": "A cat."}]},
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
    ]
    text = ChatTemplate.from_metadata(metadata, tokenizer).render(messages)
    assert text == str(reference["chat.text"])
    assert tokenizer.encode(text, False, parse_special=True) == reference["chat.ids"].tolist()
    with open_folder(path) as folder:
        readers = [*[read_picture_processor] * sees, *[read_sound_processor] * hears]
        tokens = [read(folder).token for read in readers]
    assert all(text.count(token) == 1 for token in tokens)


@pytest.mark.parametrize(
    ("pixels", "size"),
    [
        ({"min_pixels": 3136, "max_pixels": 12544}, (112, 112)),
        ({"size": {"shortest_edge": 3136, "longest_edge": 12544}}, (112, 112)),
        ({"size": {"shortest_edge": 1, "longest_edge": 2}, "min_pixels": 3136, "max_pixels": 12544}, (112, 112)),
        ({"size": {"min_pixels": 3136, "max_pixels": 12544}}, (112, 112)),
        ({}, (392, 392)),
    ],
)
def test_limits_of_area_are_read_in_all_forms(pixels: dict[str, Any], size: tuple[int, int]) -> None:
    for config in (
        {"preprocessor_config": pixels},
        {"processor_config": {"image_processor": pixels | {"patch_size": 14}}},
    ):
        processor = read_picture_processor(Folder({"model_type": "qwen2_vl"}, **config))
        (cut,) = processor.plan(400, 400)
        assert not isinstance(cut, str) and cut.resizes == (size,)


@pytest.mark.parametrize("size", [56, {"height": 56, "width": 56}])
def test_squares_are_read_in_all_forms(size: Any) -> None:
    settings = HALVES | {"size": size, "do_convert_rgb": None}
    processor = read_picture_processor(Folder({"model_type": "gemma3"}, preprocessor_config=settings))
    assert processor.count_rows(40, 30) == 256
    assert processor.lay_out(np.zeros((30, 40, 3), np.uint8)).pieces[1].values.shape == (56, 56, 3)  # type: ignore[union-attr]


@pytest.mark.parametrize("patch_size", [14, 28, {"height": 14, "width": 14}])
def test_patches_are_joined_as_the_processor_says(patch_size: Any) -> None:
    files = {
        "preprocessor_config": {"size": {"longest_edge": 1540}, "patch_size": patch_size},
        "processor_config": {"patch_size": 14, "spatial_merge_size": 2, "processor_class": "PixtralProcessor"},
    }
    (cut, end) = read_picture_processor(Folder({"model_type": "mistral3"}, **files)).plan(100, 60)
    assert not isinstance(cut, str) and cut.resizes == ((112, 84),)
    assert cut.num_rows == 5 * 3 - 1 and end == "[IMG_END]"


@pytest.mark.parametrize("model_type", ["internvl", "qianfan_ocr", "aya_vision"])
def test_what_the_processor_gives_with_every_picture_goes_before_its_files(model_type: str) -> None:
    """Published folders of InternVL 3 say that pictures are not cut, and their processor cuts them."""
    settings = HALVES | {"size": {"height": 56, "width": 56}, "max_patches": 4, "crop_to_patches": False}
    processor = read_picture_processor(Folder({"model_type": model_type}, preprocessor_config=settings))
    cuts = [piece for piece in processor.plan(120, 60) if not isinstance(piece, str)]
    assert len(cuts) == 3, "two tiles and the whole"


def test_tokens_of_the_processor_may_be_records() -> None:
    for token in ("<pic>", {"__type": "AddedToken", "content": "<pic>", "special": True}):
        folder = Folder({"model_type": "idefics3"}, processor_config={"image_token": token}, preprocessor_config=HALVES)
        assert read_picture_processor(folder).token == "<pic>"
    wrong = Folder({"model_type": "idefics3"}, processor_config={"image_token": {"content": 3}}, preprocessor_config={})
    with pytest.raises(CorruptFileError, match="image_token"):
        read_picture_processor(wrong)


def test_clip_sizes_are_numbers_in_older_files() -> None:
    settings = {"size": 56, "crop_size": 56, "feature_extractor_type": "CLIPFeatureExtractor"}
    config = {"model_type": "llava", "vision_config": {"patch_size": 14}}
    processor = read_picture_processor(Folder(config, preprocessor_config=settings))
    (entry,) = _inputs(processor.lay_out(np.zeros((60, 90, 3), np.uint8)))
    assert entry.values.shape == (56, 56, 3) and entry.num_rows == 16


def test_a_factor_of_its_own_is_in_mean_and_deviation() -> None:
    settings = HALVES | {"size": 56, "rescale_factor": 1 / 127.5}
    processor = read_picture_processor(Folder({"model_type": "gemma3"}, preprocessor_config=settings))
    values = np.arange(256) / 127.5
    assert np.allclose((np.arange(256) / 255 - processor.mean[0]) / processor.std[0], (values - 0.5) / 0.5)
    settings |= {"do_normalize": False, "rescale_factor": 1 / 255}
    processor = read_picture_processor(Folder({"model_type": "gemma3"}, preprocessor_config=settings))
    assert (processor.mean, processor.std) == ((0.0,) * 3, (1.0,) * 3)


@pytest.mark.parametrize(
    ("model_type", "settings", "words"),
    [
        ("gemma3", {"size": {"height": 56, "width": 42}}, "squares"),
        ("gemma3", {"resample": 4}, "filters"),
        ("gemma3", {"do_resize": False}, "do_resize"),
        ("gemma3", {"image_std": [0, 1, 1]}, "image_std"),
        ("gemma3", {"image_mean": [0.5, 0.5]}, "three channels"),
        ("gemma3", {"size": {"height": 1 << 20, "width": 1 << 20}}, "size"),
        ("gemma4", {"max_soft_tokens": 71}, "1120"),
        ("qwen2_vl", {"patch_size": 0}, "patch_size"),
        ("qwen2_vl", {"min_pixels": "many"}, "min_pixels"),
        ("llava_next", {"image_grid_pinpoints": [[336, 672], [1]]}, "pairs"),
        ("llava", {"do_center_crop": False}, "do_center_crop"),
        ("minicpmv4_6", {"downsample_mode": "8x"}, "4x"),
        ("mamba2", {}, "its text runs"),
    ],
)
def test_what_does_not_run_is_named(model_type: str, settings: dict[str, Any], words: str) -> None:
    folder = Folder({"model_type": model_type}, preprocessor_config=HALVES | settings)
    with pytest.raises((CorruptFileError, UnsupportedFormatError), match=words) as caught:
        read_picture_processor(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [{}, {"has_lora_adapter": True}])
def test_sounds_whose_adapter_is_missing_are_refused(settings: dict[str, Any]) -> None:
    """Granite Speech's class has one unless config.json says that it has not."""
    with pytest.raises(UnsupportedFormatError, match=r"adapter \(LoRA\).*its text runs") as caught:
        folder_kinds(Folder({"model_type": "granite_speech", **settings}))
    assert "\n" not in str(caught.value)
    there = Folder({"model_type": "granite_speech", **settings}, adapter_config={"r": 64})
    assert folder_kinds(there) == (False, True)
    assert folder_kinds(Folder({"model_type": "granite_speech", "has_lora_adapter": False})) == (False, True)


def test_sounds_of_several_stretches_are_prepared_stretch_by_stretch() -> None:
    """Audio Flamingo 3 hears ten minutes in stretches, each with a level of its own."""
    folder = Folder({"model_type": "audioflamingo3"}, preprocessor_config={"chunk_length": 2, "feature_size": 16})
    processor = read_sound_processor(folder)
    sound = np.random.default_rng(5).standard_normal(5 * 16000).astype(np.float32)
    whole = _inputs(processor.lay_out(sound))
    apart = [_inputs(processor.lay_out(sound[start : start + 32000]))[0] for start in range(0, len(sound), 32000)]
    assert [entry.num_rows for entry in whole] == [50, 50, 25]
    assert all(np.array_equal(one.values, other.values) for one, other in zip(whole, apart, strict=True))
    with pytest.raises(RequestError, match="600 s at most"):
        processor.lay_out(np.zeros(601 * 16000, np.float32))


def test_sounds_that_do_not_run_are_named() -> None:
    for settings, words in (({"sampling_rate": 8000}, "sampling_rate"), ({"dither": 0.1}, "dither")):
        with pytest.raises(UnsupportedFormatError, match=words):
            read_sound_processor(Folder({"model_type": "qwen2_audio"}, preprocessor_config=settings))
    with pytest.raises(UnsupportedFormatError, match="its text runs"):
        read_sound_processor(Folder({"model_type": "gemma3"}))


@pytest.mark.parametrize("model_type", sorted(SOUND_FAMILIES))
def test_sounds_of_any_length_have_rows_or_are_refused(model_type: str) -> None:
    settings = {} if model_type in ("gemma4", "granite_speech") else {"chunk_length": 2, "feature_size": 16}
    processor = read_sound_processor(Folder({"model_type": model_type}, preprocessor_config=settings))
    for length in (0, 1, 150, 200, 201, 400, 640, 1600, 31999, 32000):
        try:
            media = processor.lay_out(np.ones(length, np.float32))
        except RequestError as error:
            assert length < 1000 and "wanted" in str(error)
        else:
            assert all(entry.num_rows > 0 and len(entry.values) > 0 for entry in _inputs(media))


@pytest.mark.parametrize("model_type", sorted(PICTURE_FAMILIES))
def test_pictures_of_any_size_have_rows_or_are_refused(model_type: str) -> None:
    config = {"model_type": model_type, "vision_config": {"patch_size": 14}}
    processor = read_picture_processor(Folder(config))
    for width, height in ((1, 1), (1, 4000), (4000, 1), (8000, 200), (37, 90), (4032, 3024), (700, 61)):
        try:
            count = processor.count_rows(width, height)
        except RequestError as error:
            assert "wanted" in str(error)
        else:
            assert count > 0


def test_torchs_resize_goes_over_columns_first_in_fifteen_bits() -> None:
    picture = np.random.default_rng(3).integers(0, 256, (40, 130, 3), np.uint8)
    for resample, most in ((BILINEAR, 1), (BICUBIC, 24)):
        found = resize_as_torch(picture, 56, 112, resample=resample)
        other = resize_as_pillow(picture, 56, 112, resample=resample)
        levels = np.abs(found.astype(int) - other)
        assert 0 < levels.max() <= most
        assert np.array_equal(resize_as_torch(picture, 130, 40, resample=resample), picture)
    assert np.array_equal(resize_as_torch(picture, 56, 112, resample=1), resize_as_pillow(picture, 56, 112, resample=1))


def test_what_no_template_writes_around_is_part_of_it() -> None:
    seeing = read_picture_processor(Folder({"model_type": "qwen2_vl"}))
    first, _, last = seeing.lay_out(np.zeros((56, 56, 3), np.uint8), is_alone=True).pieces
    assert (first, last) == ("<|vision_start|>", "<|vision_end|>")
    assert seeing.alone == f"{first}{seeing.token}{last}"
    hearing = read_sound_processor(Folder({"model_type": "qwen2_audio"}))
    first, _, last = hearing.lay_out(np.ones(16000, np.float32), is_alone=True).pieces
    assert hearing.alone == f"{first}{hearing.token}{last}"


def test_a_prompt_needs_as_many_marks_as_pictures() -> None:
    media = PreparedMedia.from_pieces(["<a>", "<b>"])
    assert expand("x<i>y", [("<i>", [media])]) == ("x<a><b>y",)
    for prompt in ("x", "<i><i>"):
        with pytest.raises(RequestError, match="one for each"):
            expand(prompt, [("<i>", [media])])


def test_digests_tell_what_is_kept_apart() -> None:
    values = np.zeros((4, 4, 3), np.uint8)
    entries = [EncoderInput(False, values, 4, None, 4, kept=kept) for kept in (None, (1, 4), (4, 1))]
    entries.append(EncoderInput(False, values, 4, None, 4, marks=((0,), ())))
    assert len({PreparedMedia.from_pieces([entry]).digest for entry in entries}) == 4


ODD_VALUES: tuple[Any, ...] = (
    None, -1, 0, 1, 3, 1 << 20, 1 << 40, 1e308, float("nan"), "x", [], {}, [0, 0], True, [[1, 1]], [[65536, 65536]] * 3,
    {"height": 1, "width": 1}, {"height": 1 << 16, "width": 1 << 16}, {"shortest_edge": 1 << 30, "longest_edge": 1},
)  # fmt: skip
SHAPES = [(1, 1), (100_000, 1), (1, 65536), (4032, 3024), (7, 333)]


@pytest.mark.parametrize("name", SEE)
def test_settings_of_any_value_are_refused_or_make_pictures_of_bounded_size(
    media_folders: MediaFolders, name: str
) -> None:
    """Where a file says nonsense, or a picture has an extreme shape."""
    base = Folder.read(media_folders.path(name))
    keys = {"size", "crop_size", *PICTURE_FAMILIES.get(base.config["model_type"], PICTURE_FAMILIES["clip"]).defaults}
    for key in sorted(keys):
        for value in ODD_VALUES:
            try:
                processor = read_picture_processor(base.but(**{key: value}))
            except (CorruptFileError, UnsupportedFormatError) as error:
                assert "\n" not in str(error)
                continue
            for width, height in SHAPES:
                try:
                    pieces = processor.plan(width, height)
                except RequestError as error:
                    assert "\n" not in str(error)
                    continue
                cuts = [piece for piece in pieces if not isinstance(piece, str)]
                assert 0 < len(cuts) <= 1 << 13 and all(cut.num_rows > 0 for cut in cuts)
                sizes = [size for cut in cuts for size in (*cut.resizes, cut.size)]
                assert all(min(size) > 0 and size[0] * size[1] <= 1 << 28 for size in sizes)


def test_silence_is_put_on_the_side_that_the_file_says() -> None:
    sizes = {"feature_size": 16, "n_fft": 400, "hop_length": 160, "chunk_length": 1}

    def features(samples: NDArray[np.float32], model_type: str = "qwen2_5_omni", **settings: Any) -> NDArray[Any]:
        folder = Folder({"model_type": model_type}, preprocessor_config=sizes | settings)
        (entry,) = _inputs(read_sound_processor(folder).lay_out(samples))
        return entry.values

    sound = np.random.default_rng(1).standard_normal(8001).astype(np.float32)
    whole = features(np.concatenate([np.zeros(16000 - sound.size, np.float32), sound]))
    found = features(sound, padding_side="left")
    np.testing.assert_array_equal(found, whole[-50:])
    assert len(features(sound)) == 51
    with pytest.raises(UnsupportedFormatError, match="padding_side"):
        features(sound, "qwen2_audio", padding_side="left")
    with pytest.raises(CorruptFileError, match="padding_side"):
        features(sound, padding_side="above")


def test_llama_4_scales_in_single_precision_by_its_canvas() -> None:
    """Which cuts a row or column off where the product in double precision is a whole number."""
    settings = HALVES | {"size": 336, "max_patches": 5, "resize_to_max_canvas": True}
    config = {"model_type": "llama4"}
    processor = read_picture_processor(Folder(config, preprocessor_config=settings))
    sizes = {}
    for shape in ((640, 480), (480, 640), (64, 48), (333, 1000), (500, 200)):
        cut = next(piece for piece in processor.plan(*shape) if not isinstance(piece, str))
        sizes[shape] = cut.resizes[0]
    assert sizes == {
        (640, 480): (672, 503),
        (480, 640): (503, 672),
        (64, 48): (672, 504),
        (333, 1000): (336, 1009),
        (500, 200): (840, 336),
    }
