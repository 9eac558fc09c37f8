"""Sizes of blocks that few architectures have: shared keys and values, per-layer inputs, streams, sparse attention.

GGUF keys appear here and in config.py only.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from localinfer.errors import UnsupportedFormatError
from localinfer.models.decoder.block_config import MAX_CONTEXT, MAX_WIDTH
from localinfer.models.decoder.metadata import MetadataReader

Shape = tuple[int, ...]

OF_ANOTHER_CACHE = {"gemma4-assistant": "gemma4"}
"""Draft models whose layers have no keys and values, and the architecture of the target whose they attend to."""
_SPARSE_LAYERS, _SPARSE_DEVIATIONS = 10, 1.6448533535
"""Where a file does not say: of a normal distribution, one value in twenty exceeds so many deviations."""
_MOST_DEVIATIONS = 100.0
_MOST_SELECTED = 1 << 16
TWO_HEAD_SIZES = ("gemma4", "gemma-embedding2", *OF_ANOTHER_CACHE)
_TWO_ROTARY_SIZES = ("laguna", "mimo2")
_SHARED_KEYS = ("gemma3n", *TWO_HEAD_SIZES)
_WITHOUT_LOOKUP = ("gemma-embedding2",)
"""Whose layers' own inputs follow from the embedding alone."""
_INDEXED = ("deepseek32", "glm-dsa", "minimax-m3")


@dataclass(frozen=True, kw_only=True)
class IndexerConfig:
    """Sparse attention: what chooses the positions, or blocks of them, that a layer attends to.

    layers: which layers choose by keys of their own. num_selected: how many positions or blocks are chosen.
    block_size: positions of a block, 1 where single positions are chosen. num_local: blocks up to a row's own that are
    always chosen. (DeepSeek-V3.2, arXiv 2512.02556, section 2.)
    """

    layers: tuple[bool, ...]
    num_heads: int
    key_size: int
    num_selected: int
    block_size: int = 1
    num_local: int = 0


def windowed_sizes(
    reader: MetadataReader, head_dim: int, value_head_dim: int, rotary_size: int
) -> tuple[int, int, int] | None:
    """Sizes of key and value heads and how much of them rotates in sliding-window layers; None if as in the others."""
    sizes = {
        "attention.key_length_swa": head_dim,
        "attention.value_length_swa": value_head_dim,
        "rope.dimension_count_swa": rotary_size,
    }
    key, value, rotary = (reader.integer(name, size, low=0, high=MAX_WIDTH) for name, size in sizes.items())
    if (key, value, rotary) == (head_dim, value_head_dim, rotary_size):
        return None
    turns_otherwise = reader.prefix in _TWO_ROTARY_SIZES and (key, value) == (head_dim, value_head_dim)
    if reader.prefix not in TWO_HEAD_SIZES and not turns_otherwise:
        found = dict(zip(sizes, (key, value, rotary), strict=True))
        name = next(name for name, size in sizes.items() if found[name] != size)
        raise UnsupportedFormatError(
            f"{reader.full_key(name)} is {found[name]} where other layers have {sizes[name]}; "
            f"this version runs one head size per {reader.prefix} model. Choose another model."
        )
    if not key or not value:
        raise reader.contradiction("attention.key_length_swa", key, "the size of a head, as value_length_swa")
    if rotary > key or rotary % 2:
        raise reader.contradiction("rope.dimension_count_swa", rotary, f"an even number of at most {key}")
    return key, value, rotary


def num_shared_layers(reader: MetadataReader, num_layers: int) -> int:
    """How many of the last layers attend to the keys and values of earlier ones."""
    if reader.prefix not in _SHARED_KEYS:
        return 0
    # A draft model has no keys and values at all.
    most = num_layers if reader.prefix in OF_ANOTHER_CACHE else num_layers - 1
    return reader.integer("attention.shared_kv_layers", 0, low=0, high=most)


def target_hidden_size(reader: MetadataReader, tensor_shapes: Mapping[str, Shape]) -> int:
    """The width of the states that a draft model reads of its target; 0 for other models."""
    if reader.prefix not in OF_ANOTHER_CACHE:
        return 0
    key, width = "embedding_length_out", (*tensor_shapes.get("nextn.post_projection.weight", ()), 0)[0]
    size = reader.integer(key, width, low=1, high=MAX_WIDTH)
    if size != width:
        raise reader.contradiction(key, size, f"the {width} rows of nextn.post_projection.weight")
    return size


def per_layer_size(reader: MetadataReader, tensor_shapes: Mapping[str, Shape], num_layers: int) -> int:
    """The width of each layer's own input, 0 without."""
    key = "embedding_length_per_layer_input"
    size = reader.integer(key, 0, low=0, high=MAX_WIDTH) if reader.prefix in _SHARED_KEYS else 0
    looks_up = reader.prefix not in _WITHOUT_LOOKUP
    name = "per_layer_token_embd.weight" if looks_up else "per_layer_model_proj.weight"
    shape = tensor_shapes.get(name, ())
    if size and (shape[1:] if looks_up else shape[:1]) != (num_layers * size,):
        raise reader.contradiction(key, size, f"{num_layers} times that {'columns' if looks_up else 'rows'} of {name}")
    return size


def activation_sparsity(reader: MetadataReader, num_layers: int) -> tuple[float, ...]:
    """Gemma 3n's deviations above the mean that a layer's gates keep, -inf for layers that keep all; else empty."""
    if reader.prefix != "gemma3n":
        return ()
    if reader.integer("altup.active_idx", 0, low=0, high=MAX_WIDTH) != 0:
        raise reader.contradiction("altup.active_idx", 1, "0, the first stream")
    key = "activation_sparsity_scale"
    if key not in reader:
        return tuple(_SPARSE_DEVIATIONS if layer < _SPARSE_LAYERS else float("-inf") for layer in range(num_layers))
    found = reader.per_layer_numbers(key, num_layers)
    if any(not -float("inf") <= deviations <= _MOST_DEVIATIONS for deviations in found):
        raise reader.contradiction(key, list(found), f"numbers up to {_MOST_DEVIATIONS}, or -inf")
    return found


def read_indexer(reader: MetadataReader, tensor_shapes: Mapping[str, Shape], num_layers: int) -> IndexerConfig | None:
    """What chooses the positions of sparse attention; None without."""
    if reader.prefix not in _INDEXED:
        return None
    names = ("attn_k", "k_proj")
    layers = tuple(
        any(f"blk.{layer}.indexer.{name}.weight" in tensor_shapes for name in names) for layer in range(num_layers)
    )
    key, present = "attention.indexer.types", tuple(map(int, layers))
    if reader.prefix == "minimax-m3":
        # Its first layers attend to all positions.
        if not any(layers):
            return None
    elif not layers[0] or present != reader.integers(key, num_layers, _default_types(reader, present), low=0, high=1):
        raise reader.contradiction(key, list(present), "1 in layer 0 and wherever there are tensors of an indexer")
    found = IndexerConfig(
        layers=layers,
        num_heads=reader.integer("attention.indexer.head_count", low=1, high=MAX_WIDTH),
        key_size=reader.integer("attention.indexer.key_length", low=1, high=MAX_WIDTH),
        num_selected=reader.integer("attention.indexer.top_k", low=1, high=_MOST_SELECTED),
        block_size=reader.integer("attention.indexer.block_size", 1, low=1, high=MAX_CONTEXT),
        num_local=reader.integer("attention.indexer.local_blocks", 0, low=0, high=MAX_CONTEXT),
    )
    for layer in range(num_layers):
        for name in names:
            rows = (*tensor_shapes.get(f"blk.{layer}.indexer.{name}.weight", ()), found.key_size)[0]
            if rows != found.key_size:
                wanted = f"the {rows} rows of blk.{layer}.indexer.{name}.weight"
                raise reader.contradiction("attention.indexer.key_length", found.key_size, wanted)
    return found


def _default_types(reader: MetadataReader, present: tuple[int, ...]) -> tuple[int, ...]:
    """Which layers have an indexer where a file does not say: all, or in GLM's models those with tensors."""
    return present if reader.prefix == "glm-dsa" else (1,) * len(present)
