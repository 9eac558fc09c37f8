"""Vectors of prompts with pictures of models that answer about them are their last states."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import localinfer
from localinfer.quant.checkpoint.folder import open_folder
from tests.models.media.conftest import MediaFolders


def part(pixels: NDArray[np.uint8]) -> dict[str, Any]:
    return {"type": "image", "image": pixels}


@pytest.mark.parametrize("name", ["qwen3_vl", "gemma3"])
def test_vectors_of_the_last_token_lead_to_the_references_logits(media_folders: MediaFolders, name: str) -> None:
    reference, path = media_folders.reference(name), media_folders.path(name)
    with open_folder(path) as folder:
        heads = ("lm_head.weight", "language_model.lm_head.weight", "model.language_model.embed_tokens.weight")
        tensor = next(one for one in (*heads, "language_model.model.embed_tokens.weight") if one in folder.tensors)
        head = np.array(folder.array(tensor), np.float64)
    with localinfer.load(path, threads=1, kv_type="f32", disk_cache=False) as llm:
        pixels = media_folders.picture(name, 0)
        prompt = ["Look at ", part(pixels), " now"]
        (given,) = llm.embedding_inputs([prompt])
        assert given.num_tokens == len(given.token_ids) == reference["one.input_ids"].shape[1]
        vector = llm.embed(prompt, pooling="last", normalize=False)
        wanted, found = reference["one.logits"][-1].astype(np.float64), (head @ vector)[::3]
        assert np.square(found - wanted).sum() / np.square(wanted).sum() < 1e-6
        mixed: list[Any] = [prompt, "a text", [part(pixels[::-1]), "and"], prompt]
        for pooling in ("last", "mean", "first"):
            together = llm.embed_many(mixed, pooling=pooling)
            for one, alone in zip(mixed, together, strict=True):
                np.testing.assert_array_equal(llm.embed(one, pooling=pooling), alone)
        messages = [{"role": "user", "content": [part(pixels), {"type": "text", "text": "What is it?"}]}]
        chat = llm.encode_chat(messages)
        (encoded,) = llm.embedding_inputs([chat])
        assert encoded.token_ids.tolist() == list(chat.token_ids) and len(encoded.media) == 1
        again = llm.embed(llm.encode_chat(messages), pooling="last")
        np.testing.assert_array_equal(llm.embed(chat, pooling="last"), again)
        assert not np.array_equal(again, llm.embed(prompt, pooling="last"))
