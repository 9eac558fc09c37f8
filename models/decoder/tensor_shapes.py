"""Whether sizes in metadata are those of the tensors, before anything is reserved or looped over by them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from localinfer.errors import CorruptFileError
from localinfer.models.decoder.metadata import MetadataReader

if TYPE_CHECKING:
    from localinfer.models.decoder.config import LatentConfig, ModelConfig

Shape = tuple[int, ...]


def check_tensor_shapes(reader: MetadataReader, config: "ModelConfig", tensor_shapes: Mapping[str, Shape]) -> None:
    """Compare the products of heads, sizes and experts with every layer's tensors.

    Raises: CorruptFileError naming the key and the tensor that contradict each other, or the tensor that is missing.
    """
    check = _Check(reader, tensor_shapes)
    for layer in range(config.num_layers):
        block = f"blk.{layer}."
        if config.latent is None:
            _check_heads(check, block, config, layer)
        else:
            _check_latent(check, block, config.latent, config, layer)
        if config.experts is not None:
            _check_experts(check, block, config.experts.num_experts)


class _Check:
    """Compares one axis of one tensor with a product of metadata."""

    def __init__(self, reader: MetadataReader, tensor_shapes: Mapping[str, Shape]) -> None:
        self._reader, self._shapes = reader, tensor_shapes

    def has(self, name: str) -> bool:
        return name in self._shapes

    def equal(self, name: str, axis: int, wanted: int, key: str, found: str, *, optional: bool = False) -> None:
        shape = self._shapes.get(name)
        if shape is None:
            if optional:
                return
            raise CorruptFileError(
                f"{name} is not in the file; wanted a complete model of this architecture. Convert the model again or "
                "download another copy."
            )
        size = shape[axis] if -len(shape) <= axis < len(shape) else 1
        if size != wanted:
            kind = ("rows" if axis == -2 else "columns") if len(shape) == 2 else f"in {shape}"
            raise self._reader.contradiction(key, found, f"the {size} {kind} of {name}")


def _check_heads(check: _Check, block: str, config: "ModelConfig", layer: int) -> None:
    num_heads, num_kv_heads = config.num_heads[layer], config.num_kv_heads[layer]
    head, value = config.head_dim, config.value_head_dim
    columns = num_heads * value
    found = f"{num_heads} and the size of a head {value}, together {columns}"
    check.equal(f"{block}attn_output.weight", -1, columns, "attention.head_count", found)
    fused = f"{block}attn_qkv.weight"
    if check.has(fused):
        rows = num_heads * head + num_kv_heads * (head + value)
        found = f"{num_heads}, with {num_kv_heads} of keys and values and sizes {head} and {value} together {rows}"
        check.equal(fused, -2, rows, "attention.head_count", found)
        return
    for letter, count, size, key in (
        ("q", num_heads, head, "attention.key_length"),
        ("k", num_kv_heads, head, "attention.head_count_kv"),
        ("v", num_kv_heads, value, "attention.head_count_kv"),
    ):
        number = size if key == "attention.key_length" else count
        other = f"{count} heads" if number == size else f"the size of a head {size}"
        found = f"{number}, with {other} together {count * size}"
        # Files of latent attention in its old form have other tensors, and are refused by name when they are run.
        is_old_form = check.has(f"{block}attn_kv_b.weight")
        check.equal(f"{block}attn_{letter}.weight", -2, count * size, key, found, optional=is_old_form)


def _check_latent(check: _Check, block: str, latent: "LatentConfig", config: "ModelConfig", layer: int) -> None:
    num_heads, rotary_size = config.num_heads[layer], config.rope.rotary_size
    queries = num_heads * latent.key_size
    name = f"{block}attn_q_b.weight" if latent.query_rank else f"{block}attn_q.weight"
    found = f"{num_heads} and attention.key_length_mla {latent.key_size}, together {queries}"
    check.equal(name, -2, queries, "attention.head_count", found)
    if latent.query_rank:
        check.equal(name, -1, latent.query_rank, "attention.q_lora_rank", str(latent.query_rank))
    keys = latent.kv_rank + rotary_size
    found = f"{latent.kv_rank} and rope.dimension_count {rotary_size}, together {keys}"
    check.equal(f"{block}attn_kv_a_mqa.weight", -2, keys, "attention.kv_lora_rank", found)
    values = num_heads * latent.value_size
    found = f"{latent.value_size} and {num_heads} heads, together {values}"
    check.equal(f"{block}attn_output.weight", -1, values, "attention.value_length_mla", found)


def _check_experts(check: _Check, block: str, num_experts: int) -> None:
    """Stacks of experts; a stack of one may be a plain matrix."""
    for name in ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps", "ffn_gate_up_exps"):
        axis = -2 if name == "ffn_gate_inp" else -3
        check.equal(f"{block}{name}.weight", axis, num_experts, "expert_count", str(num_experts), optional=True)
