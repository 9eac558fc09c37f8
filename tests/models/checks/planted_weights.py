"""Faults of tensors: damage of disks and downloads, and what conversions get wrong."""

from collections.abc import Callable

import numpy as np

from localinfer.quant.formats.types import TensorType
from localinfer.types import FloatArray
from tests.models.checks.editable_model import EditableModel
from tests.support.typed_models import Weight

Plant = Callable[[EditableModel], None]
_GROUPS = ("attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight")


def _middle(model: EditableModel, name: str, share: float = 0.125) -> slice:
    """Where some bytes of a tensor lie, away from its ends, in the middle of a block or not."""
    size = model.bytes_of(name).size
    return slice(int(size * 0.43), int(size * 0.43) + int(size * share))


def hole_of_zeros(model: EditableModel) -> None:
    model.bytes_of("blk.2.ffn_down.weight")[_middle(model, "blk.2.ffn_down.weight")] = 0


def hole_in_the_table(model: EditableModel) -> None:
    model.bytes_of("token_embd.weight")[_middle(model, "token_embd.weight", 0.1)] = 0


def zero_tail(model: EditableModel) -> None:
    """A download that stopped, in a file that had its whole size from the start."""
    names = list(model.weights)
    for name in names[-3:]:
        model.bytes_of(name)[:] = 0
    model.bytes_of(names[-4])[model.bytes_of(names[-4]).size // 3 :] = 0


def repeated_blocks(model: EditableModel) -> None:
    """A stretch that was written again where the next should be."""
    where = _middle(model, "blk.1.ffn_up.weight")
    size = (where.stop - where.start) // 4 // 18 * 18
    data = model.bytes_of("blk.1.ffn_up.weight")
    start = where.start // 18 * 18
    for number in range(1, 4):
        data[start + number * size : start + (number + 1) * size] = data[start : start + size]


def constant_bytes(model: EditableModel) -> None:
    model.bytes_of("blk.3.attn_output.weight")[_middle(model, "blk.3.attn_output.weight", 0.2)] = 0x2C


def random_bytes(model: EditableModel) -> None:
    where = _middle(model, "blk.4.ffn_gate.weight")
    noise = np.random.default_rng(3).integers(0, 256, where.stop - where.start, np.uint8)
    model.bytes_of("blk.4.ffn_gate.weight")[where] = noise


def shifted_bytes(model: EditableModel) -> None:
    """A byte that was lost on the way: all that follow lie one too early."""
    data = model.bytes_of("blk.2.ffn_up.weight")
    data[data.size // 2 : -1] = data[data.size // 2 + 1 :].copy()


def nan_in_a_block(model: EditableModel) -> None:
    model.blocks("blk.2.ffn_down.weight")["d"][333] = np.nan


def bit_flips_in_scales(model: EditableModel) -> None:
    scales = model.blocks("blk.3.ffn_up.weight")["d"]
    bits = scales.view(np.uint16).copy()
    generator = np.random.default_rng(5)
    places = generator.choice(bits.size, bits.size // 100, replace=False)
    bits[places] ^= np.uint16(1) << generator.integers(0, 16, places.size, np.uint16)
    scales[:] = bits.view(np.float16)


def large_scales_of_a_row(model: EditableModel) -> None:
    scales = model.blocks("blk.3.ffn_down.weight")["d"].reshape(256, -1)
    scales[100] *= 1000


def large_tensor(model: EditableModel) -> None:
    model.change("blk.2.attn_v.weight", lambda w: w * 1000)


def halves_swapped(model: EditableModel) -> None:
    model.change("blk.2.ffn_down.weight", lambda w: np.roll(w, len(w) // 2, axis=0))


def halves_that_differ(model: EditableModel) -> None:
    """The second half was written with another scale, as shards of a tensor are that were merged wrongly."""

    def change(weights: FloatArray) -> FloatArray:
        weights[len(weights) // 2 :] *= 8
        return weights

    model.change("blk.3.ffn_up.weight", change)


def half_of_noise(model: EditableModel) -> None:
    def change(weights: FloatArray) -> FloatArray:
        half = weights[len(weights) // 2 :]
        half[:] = np.random.default_rng(2).standard_normal(half.shape) * half.std()
        return weights

    for layer in range(model.num_layers):
        model.change(f"blk.{layer}.ffn_up.weight", change)


def all_experts_but_one_zero(model: EditableModel) -> None:
    for kind in ("gate", "up", "down"):

        def change(weights: FloatArray) -> FloatArray:
            weights[1:] = 0
            return weights

        model.change(f"blk.1.ffn_{kind}_exps.weight", change)


def one_expert_zero(model: EditableModel) -> None:
    def change(weights: FloatArray) -> FloatArray:
        weights[2] = 0
        return weights

    model.change("blk.2.ffn_down_exps.weight", change)


def experts_alike(model: EditableModel) -> None:
    """One expert was read for all."""
    for kind in ("gate", "up", "down"):
        model.change_all(f"ffn_{kind}_exps.weight", lambda w: np.broadcast_to(w[:1], w.shape).copy())


def router_zero(model: EditableModel) -> None:
    model.change_all("ffn_gate_inp.weight", np.zeros_like)


def experts_permuted(model: EditableModel) -> None:
    """Experts in the order of their names as text, the router in that of their numbers."""
    for kind in ("gate", "up", "down"):
        model.change_all(f"ffn_{kind}_exps.weight", lambda w: np.roll(w, 1, axis=0))


def other_byte_order(model: EditableModel) -> None:
    data = model.bytes_of("blk.2.ffn_gate.weight").reshape(-1, 2)
    data[:] = data[:, ::-1].copy()


def float16_overflow(model: EditableModel) -> None:
    model.change("blk.1.ffn_down.weight", lambda w: w * np.float32(3e5))


def transposed(model: EditableModel) -> None:
    model.change_all("attn_output.weight", lambda w: w.T)


def another_type_of_equal_size(model: EditableModel) -> None:
    one = model.weights["blk.2.ffn_up.weight"]
    model.weights["blk.2.ffn_up.weight"] = Weight(TensorType.IQ4_NL, one.shape, one.blocks)


def layer_twice(model: EditableModel) -> None:
    for name in model.layer(3):
        model.weights[f"blk.3.{name}"] = model.weights[f"blk.2.{name}"]


def tensor_of_another_layer(model: EditableModel) -> None:
    model.weights["blk.4.ffn_down.weight"] = model.weights["blk.1.ffn_down.weight"]


def layers_swapped(model: EditableModel) -> None:
    for name in list(model.layer(1)):
        model.swap(f"blk.1.{name}", f"blk.4.{name}")


def layers_sorted_as_text(model: EditableModel) -> None:
    """All layers in another order."""
    first = {name: one for name, one in model.weights.items() if name.startswith("blk.")}
    count = model.num_layers
    for name, one in first.items():
        _, number, rest = name.split(".", 2)
        model.weights[f"blk.{(int(number) * 5 + 2) % count}.{rest}"] = one


def embeddings_off_by_a_row(model: EditableModel) -> None:
    model.change("token_embd.weight", lambda w: np.roll(w, 1, axis=0))


def output_off_by_a_row(model: EditableModel) -> None:
    table = model.floats("token_embd.weight")
    model.weights["output.weight"] = model.weights["token_embd.weight"]
    model.set_floats("output.weight", np.roll(table, 1, axis=0))


def random_output(model: EditableModel) -> None:
    """A matrix that was tied when the model was trained, filled as a fresh one is."""
    table = model.floats("token_embd.weight")
    model.weights["output.weight"] = model.weights["token_embd.weight"]
    model.set_floats("output.weight", np.random.default_rng(1).standard_normal(table.shape).astype(np.float32) * 0.02)


def fewer_bits_of_embeddings(model: EditableModel) -> None:
    """The table cut to whole numbers."""
    scale = float(np.abs(model.floats("token_embd.weight")).max())
    model.change("token_embd.weight", lambda w: np.round(w / scale) * scale)


def _permuted(weights: FloatArray, head_dim: int) -> FloatArray:
    """Rows of each head from two halves to pairs, as conversions of Llama do."""
    split = weights.reshape(-1, 2, head_dim // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def heads_permuted_twice(model: EditableModel) -> None:
    for name in ("attn_q", "attn_k"):
        model.change_all(f"{name}.weight", lambda w: _permuted(w, 64))


def heads_not_permuted(model: EditableModel) -> None:
    def change(weights: FloatArray) -> FloatArray:
        split = weights.reshape(-1, 32, 2, *weights.shape[1:])
        return split.swapaxes(1, 2).reshape(weights.shape)

    for name in ("attn_q", "attn_k"):
        model.change_all(f"{name}.weight", change)


def keys_permuted(model: EditableModel) -> None:
    model.change_all("attn_k.weight", lambda w: _permuted(w, 64))


def half_of_the_heads(model: EditableModel) -> None:
    """Only every second head's rows were found."""

    def change(weights: FloatArray) -> FloatArray:
        weights[:, weights.shape[1] // 2 :] = weights[:, : weights.shape[1] // 2]
        return weights

    model.change_all("attn_output.weight", change)


def half_of_the_heads_zero(model: EditableModel) -> None:
    def change(weights: FloatArray) -> FloatArray:
        weights[:, weights.shape[1] // 2 :] = 0
        return weights

    model.change_all("attn_output.weight", change)


def keys_and_values_swapped(model: EditableModel) -> None:
    for layer in range(model.num_layers):
        model.swap(f"blk.{layer}.attn_k.weight", f"blk.{layer}.attn_v.weight")


def queries_and_outputs_swapped(model: EditableModel) -> None:
    for layer in range(model.num_layers):
        model.swap(f"blk.{layer}.attn_q.weight", f"blk.{layer}.attn_output.weight")


def gate_and_up_swapped(model: EditableModel) -> None:
    for layer in range(model.num_layers):
        model.swap(f"blk.{layer}.ffn_gate.weight", f"blk.{layer}.ffn_up.weight")


def norms_less_one(model: EditableModel) -> None:
    model.change_all("norm.weight", lambda w: w - 1)


def norms_plus_one(model: EditableModel) -> None:
    model.change_all("norm.weight", lambda w: w + 1)


def norms_swapped(model: EditableModel) -> None:
    for layer in range(model.num_layers):
        model.swap(f"blk.{layer}.attn_norm.weight", f"blk.{layer}.ffn_norm.weight")


def norms_all_one(model: EditableModel) -> None:
    """Norms that nobody read, left as they begin."""
    model.change_all("norm.weight", np.ones_like)


def biases_huge(model: EditableModel) -> None:
    model.change_all("attn_k.bias", lambda b: b * 1e5)


def biases_dropped(model: EditableModel) -> None:
    for layer in range(model.num_layers):
        model.drop(*(f"blk.{layer}.attn_{part}.bias" for part in "qkv"))


def sinks_huge(model: EditableModel) -> None:
    model.change_all("attn_sinks.weight", lambda s: s * 1e4)


def state_decays_positive(model: EditableModel) -> None:
    """`A_log` as it is, or its exponential without the sign."""
    model.change_all("ssm_a", np.abs)


def state_decays_as_logarithms(model: EditableModel) -> None:
    model.change_all("ssm_a", lambda a: np.log(np.abs(a)))


def shared_experts_zero(model: EditableModel) -> None:
    model.change_all("ffn_down_shexp.weight", np.zeros_like)
