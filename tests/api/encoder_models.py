"""Small encoders with a vocabulary, for tests of the API."""

from pathlib import Path
from typing import Any

import numpy as np

from localinfer.models.text.vocabulary import PREFIX
from tests.models.arch_models import skeletons, write_skeleton
from tests.models.text.unigram_vocabularies import unigram_metadata
from tests.models.text.vocabularies import NORMAL, bert_metadata

CONTEXT = 2048


def vocabulary_entries(metadata: dict[str, Any], size: int) -> list[list[Any]]:
    """Entries of a skeleton for a vocabulary, filled up to `size` tokens."""
    tokens = metadata[PREFIX + "tokens"]
    missing = size - len(tokens)
    assert missing >= 0, f"{len(tokens)} tokens do not fit {size} rows"
    entries: list[list[Any]] = []
    for key, value in metadata.items():
        if key == PREFIX + "tokens":
            entries.append([key, "ARRAY", "STRING", [*tokens, *(f"[unused{index}]" for index in range(missing))]])
        elif isinstance(value, np.ndarray):
            is_score = value.dtype.kind == "f"
            more = [0.0 if is_score else NORMAL] * missing
            entries.append([key, "ARRAY", "FLOAT32" if is_score else "INT32", [*value.tolist(), *more]])
        elif isinstance(value, bool):
            entries.append([key, "BOOL", None, value])
        elif isinstance(value, int):
            entries.append([key, "UINT32", None, value])
        else:
            entries.append([key, "STRING", None, value])
    return entries


def write_encoder(folder: Path, name: str, *, unigram: bool = False, context: int = CONTEXT, **changes: object) -> Path:
    """The fixture of this name with words for tokens, a longer context, and changed metadata of its architecture."""
    skeleton = dict(skeletons()[name])
    vocabulary = unigram_metadata() if unigram else bert_metadata()
    size = max(128, len(vocabulary[PREFIX + "tokens"]))  # type: ignore[arg-type]
    architecture = skeleton["arch"]
    changed = {f"{architecture}.{key}": value for key, value in changes.items()}
    changed |= {f"{architecture}.context_length": context, f"{architecture}.vocab_size": size}
    skeleton["kv"] = [
        [key, kind, element, changed.get(key, value)]
        for key, kind, element, value in skeleton["kv"]
        if not key.startswith(PREFIX) or key == f"{PREFIX}token_type_count"
    ] + vocabulary_entries(vocabulary, size)
    sizes = {"token_embd.weight": size, "position_embd.weight": context}
    skeleton["tensors"] = [[key, [sizes.get(key, shape[0]), *shape[1:]]] for key, shape in skeleton["tensors"]]
    path = folder / f"{name}{'-unigram' if unigram else ''}.gguf"
    write_skeleton(skeleton, path)
    return path
