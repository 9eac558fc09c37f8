"""How keys and values lie in a page: fixed-size pages of positions, every layer of a position in the same page.

Per layer and KV head: keys in groups of sixteen positions, [page_tokens / 16][key_size][16], so that one query
dimension meets sixteen keys in one vector; then values, [page_tokens][value_stride], so that one probability meets a
whole vector.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from localinfer.errors import RequestError
from localinfer.kernels.ops import KVLayerShape

PAGE_TOKENS = 32
"""Positions per page: half a page is wasted per sequence on average, and a page is one copy when a prefix forks."""

ELEMENT_BYTES = {"f16": 2, "f32": 4}


@dataclass(frozen=True)
class KVLayout:
    """Sizes and offsets of a page, in bytes."""

    kv_type: str
    layers: Sequence[KVLayerShape]

    def __post_init__(self) -> None:
        if self.kv_type not in ELEMENT_BYTES:
            raise RequestError(f"kv_type is {self.kv_type!r}; this version keeps {' or '.join(ELEMENT_BYTES)}")

    @property
    def page_tokens(self) -> int:
        """Positions per page."""
        return PAGE_TOKENS

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored number."""
        return ELEMENT_BYTES[self.kv_type]

    def value_stride(self, layer: int) -> int:
        """Elements between one position's values and the next."""
        return (self.layers[layer].value_size + 15) // 16 * 16

    def head_bytes(self, layer: int) -> int:
        """Bytes of one KV head of one layer in a page."""
        return PAGE_TOKENS * (self.layers[layer].key_size + self.value_stride(layer)) * self.element_bytes

    def layer_offset(self, layer: int) -> int:
        """Where a layer begins in a page."""
        return sum(self.layers[i].num_kv_heads * self.head_bytes(i) for i in range(layer))

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, a multiple of 64 because each head's are."""
        return self.layer_offset(len(self.layers))
