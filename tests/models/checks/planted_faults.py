"""Every kind of fault that is planted on whole models, and which of them a load and `show --verify` say.

`python -m tests.models.checks.planted_faults [NAME ...]` prints a table: the fault, whether a load says it,
whether `show --verify` does, the milliseconds that the checks of the load took, and the line. `--healthy` prints what
is said of whole models instead: nothing, where all is well.
"""

import logging
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import localinfer
from localinfer.apps.show.verify import verify_model
from localinfer.errors import LocalinferError
from localinfer.models.checks.quick import check_hyperparameters
from localinfer.quant.methods.presets import PRESETS
from tests.models.arch_models import REFUSED, skeletons
from tests.models.checks import planted_settings as settings, planted_weights as weights
from tests.models.checks.broken_models import findings_of, sized_config
from tests.models.checks.editable_model import EditableModel, base_model

F16, Q4_0, Q4_K = "demo-f16", "demo-Q4_0", "demo-q4_k_m"
GPT2, QWEN2, PHI3 = "vocabulary:gpt-2", "vocabulary:qwen2", "vocabulary:phi-3"

FAULTS: dict[str, tuple[str, Callable[[EditableModel], None]]] = {
    "hole of zeros": (Q4_0, weights.hole_of_zeros),
    "hole of zeros, F16": (F16, weights.hole_of_zeros),
    "hole in the table": (Q4_K, weights.hole_in_the_table),
    "zero tail": (Q4_K, weights.zero_tail),
    "repeated blocks": (Q4_0, weights.repeated_blocks),
    "constant bytes": (F16, weights.constant_bytes),
    "random bytes": (Q4_0, weights.random_bytes),
    "shifted bytes": (Q4_K, weights.shifted_bytes),
    "NaN in a block": (Q4_K, weights.nan_in_a_block),
    "bit flips in scales": (Q4_0, weights.bit_flips_in_scales),
    "large scales of a row": (Q4_0, weights.large_scales_of_a_row),
    "large tensor": (F16, weights.large_tensor),
    "float16 overflow": (F16, weights.float16_overflow),
    "other byte order": (F16, weights.other_byte_order),
    "another type of equal size": (Q4_0, weights.another_type_of_equal_size),
    "halves swapped": (F16, weights.halves_swapped),
    "halves that differ": (F16, weights.halves_that_differ),
    "half of noise": (F16, weights.half_of_noise),
    "all experts but one zero": ("mixture", weights.all_experts_but_one_zero),
    "one expert zero": ("mixture", weights.one_expert_zero),
    "experts alike": ("mixture", weights.experts_alike),
    "router zero": ("mixture", weights.router_zero),
    "experts permuted": ("mixture", weights.experts_permuted),
    "shared experts zero": ("qwen2moe-moe", weights.shared_experts_zero),
    "transposed": (F16, weights.transposed),
    "layer twice": (F16, weights.layer_twice),
    "tensor of another layer": (Q4_K, weights.tensor_of_another_layer),
    "layers swapped": (F16, weights.layers_swapped),
    "layers in another order": (F16, weights.layers_sorted_as_text),
    "embeddings off by a row": (F16, weights.embeddings_off_by_a_row),
    "output off by a row": (F16, weights.output_off_by_a_row),
    "random output": (F16, weights.random_output),
    "few bits of embeddings": (F16, weights.fewer_bits_of_embeddings),
    "heads permuted twice": (F16, weights.heads_permuted_twice),
    "heads not permuted": (F16, weights.heads_not_permuted),
    "keys permuted": (F16, weights.keys_permuted),
    "half of the heads": (F16, weights.half_of_the_heads),
    "half of the heads zero": (F16, weights.half_of_the_heads_zero),
    "keys and values swapped": (F16, weights.keys_and_values_swapped),
    "queries and outputs swapped": (F16, weights.queries_and_outputs_swapped),
    "gate and up swapped": (F16, weights.gate_and_up_swapped),
    "norms less one": (F16, weights.norms_less_one),
    "norms plus one": (F16, weights.norms_plus_one),
    "norms all one": (F16, weights.norms_all_one),
    "norms swapped": (F16, weights.norms_swapped),
    "norms of Gemma around 0": ("gemma3-gqa", weights.norms_less_one),
    "norms of Qwen 3.5 around 0": ("qwen35-hybrid", weights.norms_less_one),
    "biases huge": ("qwen2-gqa", weights.biases_huge),
    "biases dropped": ("qwen2-gqa", weights.biases_dropped),
    "sinks huge": ("gpt-oss-gqa", weights.sinks_huge),
    "state decays positive": ("mamba2-recurrent", weights.state_decays_positive),
    "state decays as logarithms": ("qwen35-hybrid", weights.state_decays_as_logarithms),
    "RoPE base too large": (F16, settings.rope_base_too_large),
    "RoPE dimension halved": (F16, settings.rope_dimension_halved),
    "head count doubled": (F16, settings.head_count_doubled),
    "epsilon too large": (F16, settings.epsilon_too_large),
    "attention scale of one": (F16, settings.attention_scale_of_one),
    "positions stretched": (F16, settings.positions_stretched),
    "YaRN without a context": (F16, settings.yarn_without_a_context),
    "window of one": (F16, settings.window_of_one),
    "windows everywhere": ("gemma3-gqa", settings.windows_everywhere),
    "softcaps dropped": ("gemma2-gqa", settings.softcaps_dropped),
    "residual scale dropped": ("granite-gqa", settings.embedding_scale_dropped),
    "end is a word": (F16, settings.end_is_a_word),
    "end begins turns": (F16, settings.end_begins_turns),
    "end of turn missing": (F16, settings.end_of_turn_missing),
    "end missing": (QWEN2, settings.end_missing),
    "beginning missing": (PHI3, settings.beginning_missing),
    "beginning not added": (PHI3, settings.beginning_not_added),
    "beginning added": (QWEN2, settings.beginning_added),
    "beginning not added, story model": (F16, settings.beginning_not_added),
    "controls typed normal": (F16, settings.controls_typed_normal),
    "controls typed normal, Qwen 2": (QWEN2, settings.controls_typed_normal),
    "token types missing": (PHI3, settings.types_missing),
    "half of the merges": (QWEN2, settings.half_of_the_merges),
    "half of the merges, story model": (F16, settings.half_of_the_merges),
    "merges missing": (GPT2, settings.merges_missing),
    "another word splitting": (QWEN2, settings.another_word_splitting),
    "unknown word splitting": (GPT2, settings.unknown_word_splitting),
    "tokens off by one": (F16, settings.tokens_off_by_one),
    "byte tokens reversed": (F16, settings.last_tokens_shuffled),
    "scores all zero": (PHI3, settings.scores_all_zero),
    "scores reversed": (PHI3, settings.scores_reversed),
    "bytes typed normal": (PHI3, settings.bytes_typed_normal),
    "SentencePiece called BPE": (F16, settings.sentencepiece_called_bpe),
    "template of another family": (F16, settings.template_of_another_family),
    "template without the markers": (F16, settings.template_without_the_markers),
    "template that never ends": (F16, settings.template_that_never_ends),
}
"""By its name the whole model that a fault is planted on, and what plants it; those of headers are in HEADERS."""

HEALTHY = [
    *(F16, Q4_K, GPT2, QWEN2, PHI3, "llama", "mixture"),
    *(f"demo-{preset}" for preset in PRESETS),
    *(name for name, one in skeletons().items() if name not in REFUSED and "target" not in one.get("options", {})),
]
"""Whole models: those that ship, one of every type that `localinfer quantize` writes, and every fixture that runs by
itself."""


@dataclass(frozen=True)
class Said:
    """What is said of a file. at_load, at_verify: the lines. milliseconds: of the checks of a load."""

    at_load: tuple[str, ...]
    at_verify: tuple[str, ...]
    milliseconds: float


def names() -> list[str]:
    """Every kind of fault."""
    return [*FAULTS, *settings.HEADERS]


def plant(name: str, folder: Path) -> Path:
    """Write the file with a fault into a folder."""
    base, change = FAULTS[name]
    model = EditableModel.read(base_model(base))
    change(model)
    return model.write(folder / "broken.gguf")


def said_at_load(path: Path) -> tuple[str, ...]:
    """Lines of a load: what is warned of, or why it is refused."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            with localinfer.load(path, device="cpu", speculation=None, may_measure=False) as llm:
                lines = list(llm.info.warnings)
        except LocalinferError as error:
            lines = [str(error)]
    return tuple(dict.fromkeys([*lines, *(str(one.message) for one in warned)]))


def said_by_checks(path: Path) -> tuple[str, ...]:
    """What a load warns of or is refused for before it makes an engine, without the load."""
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            lines = [one.message for one in findings_of(path)]
        except LocalinferError as error:
            lines = [str(error)]
    return (*lines, *(str(one.message) for one in warned))


def said_at_verify(path: Path) -> tuple[str, ...]:
    """Lines of `show --verify`."""
    try:
        return tuple(f"{one.check}: {one.message}" for one in verify_model(str(path)).findings)
    except LocalinferError as error:
        return (str(error),)


def said_of(path: Path) -> Said:
    """All that is said of a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        times = [_time_of_checks(path) for _ in range(3)]
    return Said(said_at_load(path), said_at_verify(path), min(times))


def _time_of_checks(path: Path) -> float:
    """Milliseconds from opening a file to what is found of it; 0 where it is refused."""
    start = time.perf_counter()
    try:
        findings_of(path)
    except LocalinferError:
        return 0.0
    return 1000 * (time.perf_counter() - start)


@cache
def _of_base(base: str) -> Said:
    return said_of(base_model(base))


def said_of_header(name: str) -> tuple[list[str], list[str]]:
    """What is said of a header when it is whole, and when it is not."""
    model, *both = settings.HEADERS[name]
    architecture, sizes = settings.SIZES[model]
    found = []
    for own in both:
        values = dict(own)
        left_out = values.pop("without", None)
        metadata, config = sized_config(
            architecture,
            sizes,
            values.get("context_length", 4096),
            base=values.get("rope.freq_base"),
            more={key: value for key, value in values.items() if key not in ("context_length", "rope.freq_base")},
        )
        tensors = dict.fromkeys({"token_embd.weight", "output.weight"} - {left_out})
        file = SimpleNamespace(tensors=tensors, metadata=metadata)
        found.append([one.message for one in check_hyperparameters(file, config)])  # type: ignore[arg-type]
    return found[0], found[1]


def measure(name: str, folder: Path) -> Said:
    """What is said of a fault and is not said of the whole model."""
    if name in settings.HEADERS:
        whole, broken = said_of_header(name)
        lines = tuple(line for line in broken if line not in whole)
        return Said(lines, lines, 0.0)
    whole_said, said = _of_base(FAULTS[name][0]), said_of(plant(name, folder))
    return Said(
        tuple(line for line in said.at_load if line not in whole_said.at_load),
        tuple(line for line in said.at_verify if line not in whole_said.at_verify),
        said.milliseconds - whole_said.milliseconds,
    )


def print_faults(chosen: list[str]) -> None:
    """Print the table of faults, and the sums."""
    with TemporaryDirectory() as folder:
        found = {}
        for name in chosen:
            found[name] = said = measure(name, Path(folder))
            marks = ["yes" if lines else "-" for lines in (said.at_load, said.at_verify)]
            line = next(iter(said.at_load or said.at_verify), "")
            print(f"{name:34} {marks[0]:4} {marks[1]:4} {said.milliseconds:6.1f}  {line}", flush=True)
    at_load, at_verify = (sum(1 for one in found.values() if lines(one)) for lines in (_at_load, _at_verify))
    print(f"{len(found)} kinds: {at_load} said at load, {at_verify} by --verify")


def _at_load(said: Said) -> tuple[str, ...]:
    return said.at_load


def _at_verify(said: Said) -> tuple[str, ...]:
    return said.at_verify or said.at_load


def print_healthy(chosen: list[str]) -> None:
    """Print what is said of whole models."""
    alarms = 0
    for name in chosen:
        said = said_of(base_model(name))
        lines = dict.fromkeys([*said.at_load, *said.at_verify])
        alarms += bool(lines)
        print(f"{name:34} {said.milliseconds:6.1f}  {' | '.join(lines)}", flush=True)
    print(f"{len(chosen)} whole models: {alarms} alarms")


if __name__ == "__main__":
    # What is logged is in the table.
    logging.disable()
    if "--healthy" in sys.argv:
        print_healthy([name for name in sys.argv[1:] if name != "--healthy"] or HEALTHY)
    else:
        print_faults(sys.argv[1:] or names())
