"""Towers of folders compute what transformers computes, from the tensors and settings as they were published."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.errors import CorruptFileError, RequestError, UnsupportedFormatError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.loading.media import plan_media
from localinfer.models.checkpoint.families import WRAPPERS
from localinfer.models.checkpoint.tokenizer_json import read_tokenizer
from localinfer.models.media.encoder import MediaEncoder
from localinfer.models.media.folder_media import FolderMedia, media_families, open_folder_media
from localinfer.models.media.folder_settings import read_processor_settings
from localinfer.models.media.folder_sound_towers import SOUND_TOWERS
from localinfer.models.media.folder_towers import TOWER_FAMILIES, Tower, vision_settings
from localinfer.models.media.patch_positions import Resize, encode_tiles, fewer, resized_table
from localinfer.models.media.records import EncoderInput
from localinfer.models.media.tower_file import To, TowerFile, TowerNames, canonical_name
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.quant.checkpoint.folder import CheckpointFolder, StoredTensor, open_folder
from localinfer.types import FloatArray
from tests.models.media.conftest import Folder, MediaFolders
from tests.support.checkpoint_files import safetensors_bytes

SEE = (
    "aya_vision cohere2_vision gemma3 gemma4 glm4v glm_ocr idefics3 internvl kimi_k25 lfm2_vl lighton_ocr llama4 llava"
    " llava_next llava_onevision minicpmv4_6 ministral3 mistral3 ovis2 paddleocr_vl paligemma pixtral qwen2_5_omni"
    " qwen2_5_vl qwen2_vl qwen3_5 qwen3_omni_moe qwen3_vl smolvlm"
).split()
"""The mixtures' towers are those of their dense kin."""
BREAKS = {"mistral3": 28, "ministral3": 28, "pixtral": 14}
"""Pixels a row of embeddings has in each, which a row of the encoder's follows."""


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPool]:
    found = ThreadPool(1)
    yield found
    found.close()


def _open(folder: CheckpointFolder) -> FolderMedia:
    tokenizer = Tokenizer.from_metadata(read_tokenizer(folder, 416))
    return open_folder_media(folder, tokenizer.token_id)


def _error(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    assert found.shape == wanted.shape
    difference = found.astype(np.float64) - wanted
    return float(np.square(difference).sum() / np.square(wanted.astype(np.float64)).sum())


@pytest.mark.parametrize("name", SEE)
def test_embeddings_are_the_references(media_folders: MediaFolders, pool: ThreadPool, name: str) -> None:
    reference = media_folders.reference(name)
    plan = plan_media(media_folders.path(name))
    with open_folder(media_folders.path(name)) as folder:
        media = _open(folder)
        assert media.pictures is not None
        encoder = MediaEncoder(media.config, media.file, pool)
        assert plan.weight_bytes == encoder.weight_bytes
        for label, numbers in (("one", (0,)), ("two", (1, 2))):
            if f"{label}.image_embeddings" not in reference:
                continue
            rows: list[FloatArray] = []
            for index, number in enumerate(numbers):
                found = media.pictures.lay_out(media_folders.picture(name, number), index)
                inputs = [piece for piece in found.pieces if isinstance(piece, EncoderInput)]
                for entry in inputs:
                    encoded = encoder.encode(entry)
                    if name in BREAKS:
                        columns = entry.values.shape[1] // BREAKS[name]
                        encoded = encoded[np.arange(len(encoded)) % (columns + 1) != columns]
                    before, behind = map(len, entry.marks)
                    encoded = encoded[before : len(encoded) - behind]
                    rows.append(encoded.copy())
            joined = np.concatenate(rows)
            wanted = [reference[f"{label}.image_embeddings"].reshape(-1, 64)]
            wanted += [reference[key] for part in range(8) if (key := f"{label}.image_deepstack{part}") in reference]
            assert joined.shape[1] == encoder.width == 64 * len(wanted)
            if plan is not None:
                sizes = [(*entry.values.shape[1::-1], entry.kept is not None) for entry in inputs]
                patches = [encoder.num_patches(width, height, is_tiled=tiled) for width, height, tiled in sizes]
                assert min(patches) > 0 and encoder.picture_bytes(max(patches)) <= plan.buffer_bytes
            assert _error(joined, np.concatenate(wanted, axis=1)) < 1e-6
        encoder.close()


@pytest.mark.parametrize(
    "name", ["gemma4", "granite_speech", "qwen2_5_omni", "qwen2_audio", "qwen3_omni_moe", "voxtral"]
)
def test_embeddings_of_sounds_are_the_references(media_folders: MediaFolders, pool: ThreadPool, name: str) -> None:
    reference = media_folders.reference(name)
    with open_folder(media_folders.path(name)) as folder:
        media = _open(folder)
        assert media.sounds is not None
        encoder = MediaEncoder(media.config, media.file, pool)
        for label, count in (("heard", 1), ("heard-two", 2)):
            if f"{label}.audio_embeddings" not in reference:
                continue
            wanted = reference[f"{label}.audio_embeddings"]
            first = 0
            for number in range(count):
                pieces = media.sounds.lay_out(media_folders.sound(number)).pieces
                (entry,) = [piece for piece in pieces if isinstance(piece, EncoderInput)]
                found = encoder.encode(entry)
                whole = wanted[number] if wanted.ndim == 3 else wanted[first:]
                first += len(found)
                # The second is filled up to the first there, but not here.
                if name not in ("granite_speech", "qwen3_omni_moe") or number == 0:
                    assert _error(found[:, :64], whole[: len(found)]) < 1e-6 and not found[:, 64:].any()
        encoder.close()


@pytest.mark.parametrize(
    ("name", "seconds"), [("qwen2_5_omni", 1.9), ("qwen3_omni_moe", 9.3), ("gemma4", 3.1), ("granite_speech", 5.3)]
)
def test_sounds_longer_than_a_piece_have_the_rows_of_their_layout(
    media_folders: MediaFolders, pool: ThreadPool, name: str, seconds: float
) -> None:
    with open_folder(media_folders.path(name)) as folder:
        media = _open(folder)
        assert media.sounds is not None
        encoder = MediaEncoder(media.config, media.file, pool)
        samples = np.resize(media_folders.sound(0), int(seconds * 16000))
        for length in (len(samples), len(samples) - 4321):
            pieces = media.sounds.lay_out(samples[:length]).pieces
            entries = [piece for piece in pieces if isinstance(piece, EncoderInput)]
            found = [encoder.encode(entry) for entry in entries]
            assert [len(rows) for rows in found] == [entry.num_rows for entry in entries]
            assert all(np.isfinite(rows).all() for rows in found)
        encoder.close()


@dataclass
class NamedTensors:
    """A folder of which only the names, types and shapes of tensors are known."""

    tensors: dict[str, StoredTensor]
    path: Path = Path("model")
    paths: tuple[Path, ...] = ()

    def tensor(self, name: str) -> StoredTensor:
        """One of them."""
        return self.tensors[name]


def _renamed(name: str, layout: str) -> str:
    """A tensor's name as other writers have it."""
    bare = name.removeprefix("model.")
    if layout == "4.52":
        return f"model.{bare}" if not bare.startswith("lm_head") else bare
    if layout == "5":
        return bare.replace("vision_tower.vision_model.", "vision_tower.")
    return f"thinker.{bare}"


@pytest.mark.parametrize("layout", ["4.52", "5", "thinker"])
@pytest.mark.parametrize("name", ["gemma3", "llava", "qwen2_vl", "qwen3_vl", "mistral3", "internvl"])
def test_towers_are_found_in_every_layout(media_folders: MediaFolders, name: str, layout: str) -> None:
    with open_folder(media_folders.path(name)) as folder:
        media = _open(folder)
        names = _names(folder, name)
        renamed = {_renamed(stored, layout): replace(info) for stored, info in folder.tensors.items()}
        found = TowerFile(NamedTensors(renamed), [names])  # type: ignore[arg-type]
        extra = {"v.token_embd.img_break"}
        assert {name: shape for name, shape in media.file.shapes.items() if name not in extra} == found.shapes


def _names(folder: CheckpointFolder, name: str) -> TowerNames:
    settings = read_processor_settings(folder)
    family = TOWER_FAMILIES[name]
    return family.names(settings, vision_settings(settings, family))


INTERNVL = (
    (r"embeddings\.cls_token", "embeddings.class_embedding"),
    (r"embeddings\.patch_embeddings\.projection", "embeddings.patch_embedding"),
    (r"embeddings\.position_embeddings", "embeddings.position_embedding"),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"attention\.projection_layer", "attn.proj"),
    (r"attention\.", "attn."),
    (r"lambda_([12])", r"ls\1"),
    (r"layernorm_before", "norm1"),
    (r"layernorm_after", "norm2"),
    (r"^vision_tower\.", "vision_model."),
    (r"^multi_modal_projector\.layer_norm", "mlp1.0"),
    (r"^multi_modal_projector\.linear_1", "mlp1.1"),
    (r"^multi_modal_projector\.linear_2", "mlp1.3"),
)
"""Names of a folder that transformers writes as InternVL's own folders have them."""


def _as_internvl_chat(folder: CheckpointFolder, target: Path) -> None:
    """Write the towers of transformers' InternVL as InternVL's own folders are written."""
    tensors: dict[str, NDArray[Any]] = {}
    for stored in folder.tensors:
        name = stored.removeprefix("model.")
        if name.startswith(("vision_tower.", "multi_modal_projector.")):
            for written, own in INTERNVL:
                name = re.sub(written, own, name)
            tensors[name] = folder.array(stored)
    for name in [name for name in tensors if "attn.q_proj" in name]:
        parts = [tensors.pop(name.replace("q_proj", f"{part}_proj")) for part in "qkv"]
        tensors[name.replace("q_proj", "qkv")] = np.concatenate(parts)
    picture = json.loads((folder.path / "processor_config.json").read_text())["image_processor"]
    vision = dict(folder.config["vision_config"])
    for key in ("image_size", "patch_size"):
        vision[key] = vision[key][0]
    config = {
        "model_type": "internvl_chat",
        "vision_config": vision,
        "llm_config": folder.config["text_config"],
        "force_image_size": 56,
        "ps_version": "v2",
        "max_dynamic_patch": picture["max_patches"],
    }
    kept = {key: picture[key] for key in ("image_mean", "image_std", "resample")}
    (target / "config.json").write_text(json.dumps(config))
    (target / "preprocessor_config.json").write_text(json.dumps(kept | {"size": 56, "crop_size": 56}))
    (target / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    shutil.copy(folder.path / "tokenizer.json", target)


@pytest.mark.parametrize("name", sorted(set(WRAPPERS) - set(TOWER_FAMILIES) - set(SOUND_TOWERS)))
def test_wrappers_whose_parts_do_not_run_are_named_on_one_line(name: str) -> None:
    folder = Folder({"model_type": name})
    with pytest.raises(UnsupportedFormatError, match=f"'{name}'.*its text runs") as caught:
        media_families(folder, read_processor_settings(folder))
    assert "\n" not in str(caught.value)


def test_internvls_own_folders_are_read_as_those_of_transformers(
    media_folders: MediaFolders, pool: ThreadPool, tmp_path: Path
) -> None:
    with open_folder(media_folders.path("internvl")) as source:
        _as_internvl_chat(source, tmp_path)
        written = _open(source)
        assert written.pictures is not None
        with open_folder(tmp_path) as folder:
            own = _open(folder)
            assert own.pictures is not None
            encoders = [MediaEncoder(media.config, media.file, pool) for media in (written, own)]
            for number in range(3):
                picture = media_folders.picture("internvl", number)
                found, wanted = own.pictures.lay_out(picture), written.pictures.lay_out(picture)
                assert found.digest == wanted.digest
                for entry in found.pieces:
                    if isinstance(entry, EncoderInput):
                        first, second = (encoder.encode(entry).copy() for encoder in encoders)
                        assert first.tobytes() == second.tobytes()
            for encoder in encoders:
                encoder.close()


def test_names_are_without_the_words_of_their_layout() -> None:
    bare = "vision_tower.encoder.layers.0.mlp.fc1.weight"
    for before in ("", "model.", "thinker.", "vlm.model."):
        for inside in ("", "vision_model."):
            assert canonical_name(before + bare.replace("vision_tower.", f"vision_tower.{inside}")) == bare


def test_a_tensor_without_a_place_is_named() -> None:
    info = StoredTensor("tower.more.weight", "F32", (2, 2), 0, 16)
    with pytest.raises(UnsupportedFormatError, match=r"tower\.more\.weight"):
        TowerFile(NamedTensors({info.name: info}), [TowerNames(("tower",), {})])  # type: ignore[arg-type]
    kept = TowerFile(NamedTensors({info.name: info}), [TowerNames(("tower",), {}, r"tower\.more\..*")])  # type: ignore[arg-type]
    assert not kept.tensors


def test_rows_of_a_picture_see_each_other_where_the_folder_says_so(media_folders: MediaFolders) -> None:
    for name, setting, wanted in (
        ("gemma3", None, True),
        ("gemma4", "vision", True),
        ("gemma4", None, False),
        ("qwen2_vl", None, False),
    ):
        with open_folder(media_folders.path(name)) as folder:
            folder.config["text_config"]["use_bidirectional_attention"] = setting
            assert _open(folder).config.sees_itself(64) == wanted


@pytest.mark.parametrize("name", ["granite_speech", "ovis2"])
def test_embeddings_have_the_same_bits_on_two_threads(media_folders: MediaFolders, pool: ThreadPool, name: str) -> None:
    two = ThreadPool(2)
    with open_folder(media_folders.path(name)) as folder:
        media = _open(folder)
        encoders = [MediaEncoder(media.config, media.file, one) for one in (pool, two)]
        if media.pictures is not None:
            prepared = media.pictures.lay_out(media_folders.picture(name, 0))
        else:
            assert media.sounds is not None
            prepared = media.sounds.lay_out(media_folders.sound(0))
        for entry in prepared.pieces:
            assert isinstance(entry, EncoderInput)
            first, second = (encoder.encode(entry).copy() for encoder in encoders)
            assert first.tobytes() == second.tobytes()
        for encoder in encoders:
            encoder.close()
    two.close()


def test_marks_are_those_of_the_tokenizer_and_of_the_layout(media_folders: MediaFolders, pool: ThreadPool) -> None:
    with open_folder(media_folders.path("ovis2")) as folder:
        media = _open(folder)
        assert media.pictures is not None
        (entry, *_) = media.pictures.lay_out(media_folders.picture("ovis2", 0)).pieces
        assert isinstance(entry, EncoderInput)
        encoder = MediaEncoder(media.config, media.file, pool)
        with pytest.raises(RequestError, match="marks"):
            encoder.encode(replace(entry, marks=((5,), ())))
        encoder.close()
        folder.config["visual_indicator_token_ids"] = [1, 2, 3, 4, 5]
        with pytest.raises(UnsupportedFormatError, match="visual_indicator_token_ids"):
            _open(folder)


def test_types_of_quantized_towers_are_refused() -> None:
    info = StoredTensor("tower.a.weight", "I8", (2, 2), 0, 4)
    names = TowerNames(("tower",), {"tower.a": To("v.a")})
    with pytest.raises(UnsupportedFormatError, match="I8"):
        TowerFile(NamedTensors({info.name: info}), [names])  # type: ignore[arg-type]


def test_what_is_no_model_that_sees_is_refused_in_one_line(media_folders: MediaFolders) -> None:
    with open_folder(media_folders.path("qwen2_vl")) as folder:
        folder.config["model_type"] = "qwen2"
        with pytest.raises(UnsupportedFormatError, match="its text runs") as caught:
            _open(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("qwen2_vl", "num_heads", 3),
        ("qwen2_vl", "hidden_act", "relu6"),
        ("qwen3_vl", "deepstack_visual_indexes", ["a"]),
        ("qwen2_5_vl", "fullatt_block_indexes", 3),
        ("gemma3", "layer_norm_eps", "small"),
        ("ovis2", "tokenize_function", "st_argmax"),
        ("ovis2", "num_visual_indicator_tokens", 4),
        ("granite_speech", "num_heads", 3),
        ("granite_speech", "context_size", 34),
        ("granite_speech", "window_size", 4),
        ("granite_speech", "hidden_act", "relu6"),
    ],
)
def test_settings_that_make_no_sense_are_named(media_folders: MediaFolders, name: str, key: str, value: object) -> None:
    with open_folder(media_folders.path(name)) as folder:
        parts = (folder.config.get(part, {}) for part in ("vision_config", "encoder_config", "projector_config"))
        next((part for part in parts if key in part), folder.config)[key] = value
        with pytest.raises((CorruptFileError, UnsupportedFormatError), match=key):
            _open(folder)


def test_pictures_wider_than_the_window_that_they_are_seen_whole_in_are_refused() -> None:
    family = TOWER_FAMILIES["gemma4_unified"]
    files = {"processor_config": {"image_processor": {"max_soft_tokens": 280}}}
    for window, fails in ((280, False), (279, True)):
        folder = Folder({"model_type": "gemma4_unified", "text_config": {"sliding_window": window}}, **files)
        settings = read_processor_settings(folder)
        tower = Tower(settings, vision_settings(settings, family), None)  # type: ignore[arg-type]
        if fails:
            with pytest.raises(UnsupportedFormatError, match="max_soft_tokens"):
                family.fields(tower)
        else:
            assert family.fields(tower)["merge"] == 3


def test_the_manual_names_the_types_that_run() -> None:
    manual = (Path(__file__).parents[3] / "docs" / "media.md").read_text(encoding="utf-8")
    elsewhere = {"pixtral", "clip", "siglip", "siglip2", "colpali", "colqwen2"}
    types = {name for name in (*TOWER_FAMILIES, *SOUND_TOWERS) if not name.endswith("_thinker")}
    assert not {name for name in types - elsewhere if f"`{name}`" not in manual}


def test_kept_rows_are_the_middle_of_the_tiles() -> None:
    pixels = np.arange(4 * 8, dtype=np.uint8).reshape(4, 8, 1).repeat(3, 2)

    def encode(tile: NDArray[np.uint8]) -> FloatArray:
        return tile[..., :1].reshape(-1, 1).astype(np.float32)

    found = encode_tiles(pixels, 4, (2, 8), np.float32([-1.0]), 0, encode)
    assert np.array_equal(found.reshape(2, 9)[:, :8], pixels[1:3, :, 0])
    assert (found.reshape(2, 9)[:, 8] == -1).all()
    # Two tiles' worth of rows, of which those of one may stay.
    assert fewer((4, 8), 4, 1) == (2, 5) and fewer((4, 8), 4, 2) == (4, 8)
    assert len(encode_tiles(pixels, 4, (4, 8), np.float32([-1.0]), 1, encode)) == 2 * 6


def test_linear_tables_take_the_two_nearest_entries() -> None:
    table = np.arange(4, dtype=np.float32).reshape(1, 4, 1)
    assert np.allclose(resized_table(table, (1, 2), Resize.LINEAR)[:, 0], [0.5, 2.5])
    assert np.allclose(resized_table(table, (1, 8), Resize.LINEAR)[:2, 0], [0.0, 0.25])


@pytest.mark.parametrize(
    ("model_type", "heads"),
    [("idefics3", 16), ("smolvlm", 16), ("glm_ocr", 16), ("glm4v", 12), ("minicpmv4_6", 12), ("gemma3", 12)],
)
def test_heads_that_config_json_leaves_out_are_those_of_the_class(model_type: str, heads: int) -> None:
    """Which no tensor tells."""
    family = TOWER_FAMILIES[model_type]
    settings = read_processor_settings(Folder({"model_type": model_type, "vision_config": {}}))
    assert vision_settings(settings, family).integer(family.heads) == heads
