"""Folders of families near to those of the data folder: made by transformers, and answered as it answers them."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from localinfer.engine.engine import Engine
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.models.load.loader import load_model
from localinfer.models.media.encoder import MediaEncoder
from localinfer.models.media.folder_media import FolderMedia, open_folder_media
from localinfer.models.media.records import EncoderInput, PreparedMedia
from localinfer.models.text.tokenizer import Tokenizer
from localinfer.quant.checkpoint.folder import open_folder
from tests.models.media.conftest import Asked
from tests.models.media.kin_cases import CASES, Kin, Maker


def _error(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    assert found.shape == wanted.shape
    difference = found.astype(np.float64) - wanted
    return float(np.square(difference).sum() / np.square(wanted.astype(np.float64)).sum())


@pytest.fixture(scope="module")
def make(shared: Path) -> Iterator[Maker]:
    transformers = pytest.importorskip("transformers", reason="transformers, the reference, is not installed")
    torch = pytest.importorskip("torch", reason="torch, which the reference runs on, is not installed")
    source = shared / "vision" / "hf"
    if not source.is_dir():
        pytest.skip("the data folder ../shared has no models that see")
    transformers.logging.set_verbosity_error()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield Maker(source, transformers)
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_kin_of_families_answer_as_transformers(make: Maker, name: str, tmp_path: Path) -> None:
    kin = CASES[name](make, Random(name))
    model_class = getattr(make.transformers, kin.model)
    made = model_class._from_config(kin.config, attn_implementation="eager").float().eval()
    make.weights(made, str(tmp_path), 1)
    reference = model_class.from_pretrained(str(tmp_path), dtype="float32", attn_implementation="eager").eval()
    for part in (kin.tokenizer, kin.images, kin.sounds):
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(str(tmp_path))
    if kin.processor:
        (tmp_path / "processor_config.json").write_text(json.dumps(dict(kin.processor)))
    pool = ThreadPool(1)
    model = load_model(tmp_path, threads=1, kv_type="f32", takes_media=True, verify=False, batch_rows=256)
    engine, tokenizer = Engine(model), model.tokenizer
    assert tokenizer is not None
    with open_folder(tmp_path) as folder:
        media = open_folder_media(folder, tokenizer.token_id, has_mrope=kin.has_types)
        encoder = MediaEncoder(media.config, media.file, pool)
        asked = Asked(media, encoder)
        for given, prepared in _prompts(make, kin, media):
            pieces = ("Look at ", *prepared.pieces, " now")
            ids = _ids(kin, pieces, tokenizer, adds_bos=media.pictures is None or media.pictures.adds_bos)
            inputs = dict(given) | {"input_ids": make.torch.tensor([ids])}
            if kin.has_types:
                inputs["mm_token_type_ids"] = (inputs["input_ids"] == tokenizer.token_id(kin.placeholders[0])).int()
            inputs = {kin.renamed.get(key, key): value for key, value in inputs.items()}
            wanted = next(iter(make.features(reference, inputs).values()))
            rows = [_unmarked(encoder, piece) for piece in prepared.pieces if isinstance(piece, EncoderInput)]
            found = np.concatenate(rows)
            assert _error(found, wanted.reshape(-1, found.shape[1])) < 1e-6
            logits = asked.logits(engine, tokenizer, pieces)
            wanted = reference(**inputs, use_cache=False).logits[0].float().numpy()
            assert _error(logits * kin.logits_divisor, wanted) < 1e-6
        encoder.close()
    engine.close()
    pool.close()


def _unmarked(encoder: MediaEncoder, piece: EncoderInput) -> NDArray[np.float32]:
    before, behind = map(len, piece.marks)
    return encoder.encode(piece)[before : piece.num_rows - behind].copy()


def _ids(kin: Kin, pieces: Sequence[str | EncoderInput], tokenizer: Tokenizer, *, adds_bos: bool) -> list[int]:
    """Ids with a placeholder in place of each embedding."""
    ids = list(tokenizer.encode("")) if adds_bos else []
    for piece in pieces:
        if isinstance(piece, str):
            ids += tokenizer.encode(piece, False, parse_special=True)
        else:
            placeholder = tokenizer.token_id(kin.placeholders[piece.is_sound])
            assert placeholder is not None
            ids += [placeholder] * piece.num_rows
    return ids


def _prompts(make: Maker, kin: Kin, media: FolderMedia) -> Iterator[tuple[Mapping[str, Any], PreparedMedia]]:
    """What the model is given beside ids, and what is put into a prompt here."""
    for number, (width, height) in enumerate(kin.sizes if kin.images is not None else ()):
        picture = make.picture(1, number, width, height)
        assert media.pictures is not None
        prepared = media.pictures.lay_out(np.asarray(picture))
        if hasattr(kin.images, "save_pretrained"):
            yield kin.images(images=[picture], return_tensors="pt"), prepared
        else:
            yield kin.images(*_inputs(prepared)), prepared
    for number, length in enumerate(kin.seconds if kin.sounds is not None else ()):
        sound = make.sound(1, number, length)
        assert media.sounds is not None
        prepared = media.sounds.lay_out(sound)
        if hasattr(kin.sounds, "save_pretrained"):
            yield kin.sounds([sound], sampling_rate=16000, return_tensors="pt", **kin.call), prepared
        else:
            yield kin.sounds(*_inputs(prepared)), prepared


def _inputs(prepared: PreparedMedia) -> list[EncoderInput]:
    return [piece for piece in prepared.pieces if isinstance(piece, EncoderInput)]
