"""Whole models of every family that sees or hears, from a file's bytes to logits, beside llama.cpp's answers."""

import io
from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer.generation.chat.media_parts import MediaSource
from localinfer.generation.media import MediaReader
from localinfer.loading.media import plan_media
from tests.models.media.fixtures import SEED, answers, builder, skeletons

Image = pytest.importorskip("PIL.Image", reason="Pillow is an optional package")
soundfile = pytest.importorskip("soundfile", reason="soundfile is an optional package")
pytestmark = pytest.mark.skipif(not skeletons(), reason="the fixtures ../shared/vision are not beside this checkout")

MARK = "<__media__>"
MOST_ERROR = {"qwen2.5vl-q8_0": 2e-3, "qwen3.5": 1e-4}
"""1e-5 elsewhere. Activations are rounded to 8 bits, and otherwise than there; random recurrent layers of qwen3.5 grow
what is different from layer to layer, and the peer's own embeddings are 1e-7 from the exact ones."""
MOST_ROWS = 200
"""Of a case that is computed here; larger ones are compared part by part elsewhere."""


def sources(name: str, case: str) -> tuple[str, list[MediaSource]]:
    """The prompt of a case and what stands at its marks."""
    family = skeletons()[name]

    def picture(width: int, height: int) -> MediaSource:
        buffer = io.BytesIO()
        Image.fromarray(builder().picture(width, height, SEED)).save(buffer, "PNG")
        return MediaSource("image", buffer.getvalue(), "messages[0].content[0]")

    def sound(samples: int) -> MediaSource:
        buffer = io.BytesIO()
        soundfile.write(buffer, builder().sound(samples, SEED), 16000, format="WAV", subtype="FLOAT")
        return MediaSource("audio", buffer.getvalue(), "messages[0].content[0]")

    if case == "pair":
        return f"{MARK}{MARK} in the end", [picture(*family["pictures"][place]) for place in (0, 2)]
    if case == "mixed":
        return f"The cat {MARK} and {MARK}\nthe end", [sound(family["sounds"][0]), picture(*family["pictures"][0])]
    one = picture(*map(int, case.split("x"))) if "x" in case else sound(int(case))
    return f"The cat {MARK}\nand the hat", [one]


def cases(name: str) -> list[str]:
    """The case of most rows within the limit, and the one of several."""
    found = {key[len(name) + 1 :].rsplit(".", 1)[0] for key in answers().files if key.startswith(f"{name}.")}
    counts = {
        case: int(answers()[f"{name}.{case}.counts"][answers()[f"{name}.{case}.kinds"] > 0].sum())
        for case in found
        if f"{name}.{case}.logits" in answers().files and np.isfinite(answers()[f"{name}.{case}.logits"]).all()
    }
    single = [case for case, count in counts.items() if case not in ("pair", "mixed", "limited") and count <= MOST_ROWS]
    return [*([max(single, key=counts.__getitem__)] if single else []), *({"pair", "mixed"} & counts.keys())]


@pytest.mark.parametrize("name", skeletons())
def test_logits_are_those_of_the_peer(name: str, tmp_path: Path) -> None:
    family = skeletons()[name]
    builder().write(family["text"], tmp_path / f"{name}.gguf", SEED, family["specials"])
    builder().write(family["mmproj"], tmp_path / f"mmproj-{name}.gguf", SEED)
    with localinfer.load(tmp_path / f"{name}.gguf", threads=1, kv_type="f32", disk_cache=False) as llm:
        assert llm._media is not None
        plan = plan_media(tmp_path / f"mmproj-{name}.gguf")
        assert plan.kinds == llm._media.kinds and plan.weight_bytes == llm._media._encoder.weight_bytes
        tokenizer = llm.tokenizer
        reader = MediaReader(llm._media, tokenizer)
        for case in cases(name):
            prompt, given = sources(name, case)
            read = reader.read(given)
            text = prompt
            for source in given:
                text = text.replace(MARK, source.marker, 1)
            begin = [tokenizer.bos_token_id] if tokenizer.adds_bos and tokenizer.bos_token_id is not None else []
            ids = [*begin, *reader.encode_segments([(text, True)])]
            wanted = answers()[f"{name}.{case}.logits"]
            found = llm._engine.logits(ids, reader.runs(text))[-len(wanted) :]
            error = ((found - wanted) ** 2).sum() / (wanted**2).sum()
            assert error < MOST_ERROR.get(name, 1e-5), case
            assert len(read) == len(given)
