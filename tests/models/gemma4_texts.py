"""Small Gemma 4 models with a vocabulary: a target, and the draft model made for it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from localinfer.models.text.vocabulary import PREFIX
from tests.api.encoder_models import vocabulary_entries
from tests.models.arch_models import skeletons, write_skeleton
from tests.models.text.vocabularies import CONTROL, USER_DEFINED, gemma4_metadata

TARGET, DRAFT = "gemma4-e2b", "gemma4-assistant-draft"
CONTROLS = ("<|turn>", "<turn|>")
MARKERS = ("<|tool_call>", "<tool_call|>", "<|channel>", "<channel|>", '<|"|>')


def write_gemma4(
    folder: Path,
    name: str = TARGET,
    *,
    context: int = 1024,
    renamed: Mapping[str, str] | None = None,
    further: Sequence[tuple[str, list[int]]] = (),
    template: str | None = None,
) -> Path:
    """The fixture of this name with text for tokens and a longer context.

    renamed: tokens in place of others. further: names and shapes of tensors that it has besides.
    """
    skeleton = dict(skeletons()[name])
    metadata: dict[str, Any] = dict(gemma4_metadata())
    tokens = [(renamed or {}).get(token, token) for token in (*metadata[PREFIX + "tokens"], *CONTROLS, *MARKERS)]
    types = [*metadata[PREFIX + "token_type"], *[CONTROL] * len(CONTROLS), *[USER_DEFINED] * len(MARKERS)]
    merges = metadata.pop(PREFIX + "merges")
    metadata |= {
        PREFIX + "tokens": tokens,
        PREFIX + "token_type": np.array(types, np.int32),
        PREFIX + "scores": np.zeros(len(tokens), np.float32),
    }
    size, arch = -(-len(tokens) // 16) * 16, skeleton["arch"]
    changed = {f"{arch}.context_length": context, f"{arch}.vocab_size": size}
    kept = [entry for entry in skeleton["kv"] if not entry[0].startswith(PREFIX)]
    skeleton["kv"] = [[key, kind, element, changed.get(key, value)] for key, kind, element, value in kept]
    skeleton["kv"] += [*vocabulary_entries(metadata, size), [PREFIX + "merges", "ARRAY", "STRING", merges]]
    if template is not None:
        skeleton["kv"].append(["tokenizer.chat_template", "STRING", None, template])
    sizes = {"token_embd.weight": size, "per_layer_token_embd.weight": size}
    tensors = [*skeleton["tensors"], *further]
    skeleton["tensors"] = [[key, [sizes.get(key, shape[0]), *shape[1:]]] for key, shape in tensors]
    path = folder / f"{name}.gguf"
    write_skeleton(skeleton, path)
    return path
