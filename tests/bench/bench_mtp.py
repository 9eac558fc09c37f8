"""What drafts of a model's own layer bring: `python -m tests.bench.bench_mtp [--shape 0.5b] [--type Q4_0]`.

The model has a real one's shape and random weights, so the tokens of its text are replaced by a reference's, as in
`bench_speculation`, and those of its draft layer by ones that are right with a given chance: the layer, its output head
and the sampling of its tokens run in full all the same. A share of the reference (--covered) is among the tokens that
the short head has; a draft by that head is never right about the others.
"""

import argparse
import tempfile
import time
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from localinfer.engine.cache.block_hashes import NO_SALT
from localinfer.engine.cache.sequence import SequenceCache
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.sampler import MAX_DRAFT_TOKENS, SamplingParams, SamplingPlan
from localinfer.engine.scheduler import Generation
from localinfer.engine.speculation.costs import VerificationCosts
from localinfer.engine.speculation.mtp import DraftHead, MTPDrafter, MTPText
from localinfer.engine.speculation.verify import Speculation, SpeculationRecord
from localinfer.loading.drafters import make_speculation
from localinfer.models.decoder.draft_layers import short_head_tokens
from localinfer.models.load.loader import Model, load_model
from localinfer.types import TokenIds
from tests.bench.bench_speculation import Kept, ReplayingSampler

# Layers, width, heads, KV heads, size of a head, width of feed-forward blocks, vocabulary.
SHAPES = {
    "0.5b": (24, 896, 14, 2, 64, 4864, 151936),
    "0.6b": (28, 1024, 16, 8, 128, 3072, 151936),
    "1b": (16, 2048, 32, 8, 64, 8192, 128256),
    "mixture": (16, 1024, 16, 4, 64, 512, 151936),
}
_EXPERTS = {"mixture": (64, 8)}
"""Experts of a layer, beside a shared one, and how many a token is sent to; a random router sends each to others."""
_BASE = 1 << 22
_PROMPT = 32
_TURN = 12


def write_model(path: Path, shape: str, type_name: str) -> None:
    """Write a model with a draft layer, random weights and no tokenizer."""
    layers, width, heads, kv_heads, size, inner, vocabulary = SHAPES[shape]
    writer = gguf.GGUFWriter(str(path), "glm4moe")
    writer.add_context_length(4096)
    writer.add_embedding_length(width)
    writer.add_block_count(layers + 1)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(vocabulary)
    writer.add_uint32("glm4moe.nextn_predict_layers", 1)
    num_experts, num_chosen = _EXPERTS.get(shape, (0, 0))
    if num_experts:
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(num_chosen)
        writer.add_expert_feed_forward_length(inner)
        writer.add_expert_shared_count(1)
        writer.add_leading_dense_block_count(0)
    kind = gguf.GGMLQuantizationType[type_name]
    base = np.random.default_rng(7).standard_normal(_BASE, dtype=np.float32) / np.sqrt(width)
    codes = gguf.quants.quantize(base.reshape(-1, 256), kind).reshape(-1)
    per_value = codes.size / _BASE

    def matrix(name: str, rows: int, columns: int, *experts: int) -> None:
        data = np.resize(codes, int(np.prod((*experts, rows, columns)) * per_value)).reshape(*experts, rows, -1)
        writer.add_tensor(f"{name}.weight", data, raw_dtype=kind)

    def norm(name: str, length: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(length, np.float32))

    matrix("token_embd", vocabulary, width)
    norm("output_norm", width)
    for layer in range(layers + 1):
        block = f"blk.{layer}."
        norm(f"{block}attn_norm", width)
        norm(f"{block}post_attention_norm", width)
        matrix(f"{block}attn_q", heads * size, width)
        matrix(f"{block}attn_k", kv_heads * size, width)
        matrix(f"{block}attn_v", kv_heads * size, width)
        matrix(f"{block}attn_output", width, heads * size)
        for suffix, experts in (("_exps", (num_experts,)), ("_shexp", ())) if num_experts else (("", ()),):
            matrix(f"{block}ffn_gate{suffix}", inner, width, *experts)
            matrix(f"{block}ffn_up{suffix}", inner, width, *experts)
            matrix(f"{block}ffn_down{suffix}", width, inner, *experts)
        if num_experts:
            router = np.random.default_rng(layer).standard_normal((num_experts, width), dtype=np.float32)
            writer.add_tensor(f"{block}ffn_gate_inp.weight", router)
    block = f"blk.{layers}.nextn."
    matrix(f"{block}eh_proj", width, 2 * width)
    for name in ("enorm", "hnorm", "shared_head_norm"):
        norm(f"{block}{name}", width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class ScriptedDrafter(MTPDrafter):
    """Drafts in full, and then says the reference's token or a wrong one, by a seeded coin per position."""

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.reference: TokenIds = np.zeros(0, np.int32)
        self.is_right: NDArray[np.bool_] = np.zeros(0, np.bool_)

    def begin(self, plan: SamplingPlan, salt: bytes = NO_SALT) -> "ScriptedText":
        """Follow one generation, as `MTPDrafter` does."""
        return ScriptedText(self, plan)


class ScriptedText(MTPText):
    """One generation of a `ScriptedDrafter`."""

    def __init__(self, drafter: ScriptedDrafter, plan: SamplingPlan) -> None:
        super().__init__(drafter, plan)
        self._script = drafter

    def draft(self, tokens: TokenIds, out: TokenIds, sequence: SequenceCache, head: DraftHead) -> int:
        """As the drafter says, where the head has the token."""
        count = super().draft(tokens, out, sequence, head)
        script = self._script
        for index in range(count):
            place = tokens.size + index
            right = int(script.reference[place])
            is_said = script.is_right[place] and right < head.num_tokens
            out[index] = right if is_said else (right + 1) % head.num_tokens
        return count


class Racers:
    """One model with its draft layer and once more without, on the same threads; both say what they are told."""

    def __init__(self, path: Path, threads: int | None, heads: str) -> None:
        self.drafting = load_model(path, threads=threads, draft_layers=True)
        self.plain = load_model(path, beside=self.drafting)
        self.drafter = ScriptedDrafter(self.drafting)
        if heads != "both":
            self.drafter.heads = self.drafter.heads[:1] if heads == "whole" else self.drafter.heads[1:]
        self._costs = make_speculation("ngram", self.plain, None).costs
        self._sampler = ReplayingSampler(self.drafting.config.vocab_size)

    def costs(self) -> list[float]:
        """Seconds of steps of 1 to 16 rows."""
        return [self._costs.seconds(rows) for rows in range(1, MAX_DRAFT_TOKENS + 2)]

    def race(self, chance: float, covered: float, num_tokens: int, params: SamplingParams) -> "Race":
        """Replay one text with drafts and without, in turns."""
        generator, vocabulary = np.random.default_rng(3), self.drafting.config.vocab_size
        size = _PROMPT + num_tokens
        is_covered = generator.random(size) < covered
        first = short_head_tokens(vocabulary)
        reference = np.where(
            is_covered, generator.integers(0, first, size), generator.integers(first, vocabulary - 1, size)
        ).astype(np.int32)
        self.drafter.reference, self.drafter.is_right = reference, generator.random(size) < chance
        self._sampler.reference = reference
        speculation = Speculation(VerificationCosts(self.costs()), ngram=None, model=self.drafter)
        generations: list[Generation] = []
        for model, drafting in ((self.drafting, speculation), (self.plain, None)):
            engine = Engine(Kept(model), speculation=drafting)
            engine._runner.sampler = self._sampler
            generations.append(engine.generate(reference[:_PROMPT], params, max_tokens=num_tokens))
        for generation in generations:
            next(generation)
        return _run(*generations)


def _run(drafted: Generation, plain: Generation) -> "Race":
    """Take turns of `_TURN` tokens to the end of the texts."""
    times: list[tuple[float, float]] = []
    turn = 0
    while True:
        seconds = [0.0, 0.0]
        for index in (0, 1) if turn % 2 else (1, 0):
            generation = (drafted, plain)[index]
            began = time.perf_counter()
            taken = sum(1 for _ in zip(range(_TURN), generation, strict=False))
            seconds[index] = time.perf_counter() - began
        if taken < _TURN:
            break
        times.append((seconds[0], seconds[1]))
        turn += 1
    record = drafted.record.speculation
    assert record is not None, "it speculated"
    return Race(np.array(times), record)


class Race:
    """Seconds of turns with drafts and without, float64[turns, 2]; and what the drafts did."""

    def __init__(self, times: NDArray[np.float64], record: SpeculationRecord) -> None:
        self.times = times
        self.record = record

    def __str__(self) -> str:
        drafted, plain = self.times.T
        record = self.record
        lengths = np.flatnonzero(record.drafted)
        return (
            f"{plain.sum() / drafted.sum():>8.2f}{np.median(plain) / np.median(drafted):>8.2f}"
            f"{plain.min() / drafted.min():>8.2f}{record.decoded_tokens / record.forward_passes:>13.2f}"
            f"{sum(record.accepted) / max(1, sum(record.drafted)):>10.2f}"
            f"{1 + lengths.max() if lengths.size else 0:>9}{sum(record.drafted):>9}"
        )


def main() -> None:
    """Print one line per chance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="0.5b", help="mixture: of experts")
    parser.add_argument("--type", default="Q4_0", help="of all matrices")
    parser.add_argument("--model", type=Path, help="a file that was written before, or is to be kept")
    parser.add_argument("--chances", default="0,0.1,0.3,0.6,0.8")
    parser.add_argument("--covered", type=float, default=0.88, help="share of the text that the short head can draft")
    parser.add_argument("--heads", choices=["both", "whole", "short"], default="both")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=240)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = options.model or Path(folder) / "model.gguf"
        if not path.exists():
            write_model(path, options.shape, options.type)
        racers = Racers(path, options.threads, options.heads)
        costs = racers.costs()
        curve = " ".join(f"{rows}:{costs[rows - 1] / costs[0]:.2f}" for rows in (1, 2, 3, 4, 5, 6, 8))
        per_head = ", ".join(
            f"{head.num_tokens} tokens {head.seconds_per_token / costs[0]:.3f}" for head in racers.drafter.heads
        )
        print(f"plain step {1e3 * costs[0]:.1f} ms; cost by rows {curve}; drafting a token: {per_head}")
        print(
            f"{'chance':>8}{'all':>8}{'median':>8}{'best':>8}{'tokens/pass':>13}{'accepted':>10}{'longest':>9}{'drafted':>9}"
        )
        params = SamplingParams(temperature=options.temperature)
        for chance in map(float, options.chances.split(",")):
            print(f"{chance:>8}{racers.race(chance, options.covered, options.tokens, params)}", flush=True)


if __name__ == "__main__":
    main()
