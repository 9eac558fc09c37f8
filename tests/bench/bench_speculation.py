"""What speculation brings on a model of real size: `python -m tests.bench.bench_speculation MODE MODEL [options]`.

No large model's texts are needed: the model computes and samples as ever, and each sampled token is then replaced by the
next one of a reference text (teacher-forced replay). So time is that of a real model, and acceptance that of real text.

scripted: drafts that are right with a known chance. edits: texts with small changes (`edit_tasks`), by n-grams and with
the source as prediction. books: free text, from text files given by --texts.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from localinfer.draft_depth import MAX_DEPTH, VerificationCosts
from localinfer.engine import Engine
from localinfer.models.loader import Model, load_model
from localinfer.ngram_drafter import NgramDrafter
from localinfer.sampling import Sampler, SamplingParams, SamplingPlan
from localinfer.speculation import LookupDrafter, Speculation, SpeculationRecord
from localinfer.speculation_setup import make_speculation
from tests.bench.edit_tasks import edit_tasks

TokenIds = NDArray[np.int32]
SETTLING_TOKENS = 64


class ReplayingSampler(Sampler):
    """Samples, and then says what the reference says."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.reference: TokenIds = np.zeros(0, np.int32)

    def choose(self, logits: NDArray[np.float32], plan: SamplingPlan, position: int, history: TokenIds) -> int:
        super().choose(logits, plan, position, history)
        return int(self.reference[position])


class ScriptedDrafter:
    """Drafts the reference, each token right with a given chance."""

    match_length = 1

    def __init__(self, reference: TokenIds, chance: float) -> None:
        generator = np.random.default_rng(7)
        self._tokens = np.where(generator.random(reference.size) < chance, reference, reference + 1).astype(np.int32)

    def begin(self, prediction: TokenIds) -> "ScriptedDrafter":
        return self

    def draft(self, tokens: TokenIds, out: TokenIds) -> int:
        found = self._tokens[tokens.size : tokens.size + out.size]
        out[: found.size] = found
        return int(found.size)


@dataclass
class Replay:
    """Seconds of the tokens after the first, and of those after the settled ones; what drafts did."""

    seconds: float
    num_tokens: int
    settled_seconds: float
    settled_tokens: int
    record: SpeculationRecord | None


class Bench:
    """One model, whose generations say what they are told."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.costs = make_speculation("ngram", model, None).costs
        self._sampler = ReplayingSampler(model.config.vocab_size)

    def speculation(self, drafter: LookupDrafter) -> Speculation:
        seconds = [self.costs.seconds(rows) for rows in range(1, MAX_DEPTH + 2)]
        return Speculation(VerificationCosts(seconds), ngram=drafter, model=None)

    def run(
        self, prompt: Sequence[int], output: Sequence[int], drafting: Speculation | None, prediction: Sequence[int] = ()
    ) -> Replay:
        """Replay one output after one prompt, on a cache that holds nothing."""
        engine = Engine(_Kept(self.model), speculation=drafting)
        engine._sampler = self._sampler
        self._sampler.reference = np.array([*prompt, *output], np.int32)
        params = SamplingParams(temperature=0.0)
        generation = engine.generate(prompt, params, max_tokens=len(output), prediction=prediction)
        next(generation)
        began = time.perf_counter()
        stamps = [began]
        for _ in generation:
            stamps.append(time.perf_counter())
        settled = min(SETTLING_TOKENS, len(stamps) - 1)
        result = Replay(
            stamps[-1] - began,
            len(stamps) - 1,
            stamps[-1] - stamps[settled],
            len(stamps) - 1 - settled,
            generation.record.speculation,
        )
        engine.close()
        return result


class _Kept:
    """A model that outlives an engine."""

    def __init__(self, model: Model) -> None:
        self.config, self.program, self.kv_layout = model.config, model.program, model.kv_layout

    def close(self) -> None:
        """Stay open."""


def scripted(bench: Bench, num_tokens: int) -> None:
    """Speed over plain decoding by the chance that a drafted token is right."""
    generator = np.random.default_rng(3)
    ids = generator.integers(300, bench.model.config.vocab_size - 300, num_tokens + 33).tolist()
    prompt, output = ids[:32], ids[32:]
    print(f"{'chance':>8}{'all':>8}{'settled':>9}{'tokens/pass':>13}  accepted by place")
    for chance in (0.0, 0.6, 0.8, 0.95):
        plain = bench.run(prompt, output, None)
        ours = bench.run(prompt, output, bench.speculation(ScriptedDrafter(np.array(ids, np.int32), chance)))
        again = bench.run(prompt, output, None)
        settled = (plain.settled_seconds + again.settled_seconds) / 2 / ours.settled_seconds
        whole = (plain.seconds + again.seconds) / 2 / ours.seconds
        print(f"{chance:>8}{whole:>8.2f}{settled:>9.2f}{_passes(ours)}", flush=True)


def edits(bench: Bench, num_tasks: int) -> None:
    """Speed over plain decoding on edits, by n-grams alone and with the source as prediction."""
    tokenizer = bench.model.tokenizer
    assert tokenizer is not None, "the texts have to be tokenized"
    print(f"{'task':<52}{'tokens':>7}{'n-gram':>8}{'predicted':>11}{'tokens/pass':>13}  accepted by place")
    worst = [9.0, 9.0]
    for task in edit_tasks()[:num_tasks]:
        prompt = tokenizer.encode(task.prompt)
        output = tokenizer.encode(task.result, add_special=False)
        prediction = tokenizer.encode(task.source, add_special=False)
        # The time of a plain step hardly changes within one text, so a part of it is enough.
        plain = bench.run(prompt, output[:60], None)
        ngram = bench.run(prompt, output, bench.speculation(NgramDrafter()))
        predicted = bench.run(prompt, output, bench.speculation(NgramDrafter()), prediction)
        speeds = [
            plain.seconds / plain.num_tokens * replay.num_tokens / replay.seconds for replay in (ngram, predicted)
        ]
        worst = [min(pair) for pair in zip(worst, speeds, strict=True)]
        print(f"{task.name:<52}{len(output):>7}{speeds[0]:>8.2f}{speeds[1]:>11.2f}{_passes(ngram)}", flush=True)
    print(f"{'worst':<59}{worst[0]:>8.2f}{worst[1]:>11.2f}")


def books(bench: Bench, texts: Sequence[Path], num_texts: int) -> None:
    """Speed over plain decoding on chapters: what was never read before should not be slower."""
    tokenizer = bench.model.tokenizer
    assert tokenizer is not None, "the texts have to be tokenized"
    print(f"{'text':<40}{'all':>8}{'settled':>9}{'tokens/pass':>13}  accepted by place")
    worst = 9.0
    for index in range(num_texts):
        path = texts[index % len(texts)]
        text = path.read_text("utf-8", errors="replace")
        start = len(text) * (1 + index // len(texts)) // 4
        ids = tokenizer.encode(text[start : start + 6000])
        prompt, output = ids[:256], ids[256:456]
        # Plain steps in turns with drafted ones, before and after, since the machine is not the same for long.
        before = bench.run(prompt, output[:70], None)
        ours = bench.run(prompt, output, bench.speculation(NgramDrafter()))
        after = bench.run(prompt, output[:70], None)
        plain = (before.seconds + after.seconds) / (before.num_tokens + after.num_tokens)
        whole = plain * ours.num_tokens / ours.seconds
        settled = plain * ours.settled_tokens / ours.settled_seconds
        worst = min(worst, settled)
        print(f"{path.name:<40}{whole:>8.2f}{settled:>9.2f}{_passes(ours)}", flush=True)
    print(f"{'worst':<48}{worst:>9.2f}")


def _passes(replay: Replay) -> str:
    record = replay.record
    assert record is not None, "it speculated"
    places = zip(record.accepted, record.drafted, strict=True)
    shares = " ".join(f"{100 * accepted / drafted:.0f}" for accepted, drafted in places if drafted)
    return f"{record.decoded_tokens / record.forward_passes:>13.2f}  {shares}"


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["scripted", "edits", "books"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=Path, help="folder of .txt files, for books")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--count", type=int, default=20, help="how many texts or tasks")
    options = parser.parse_args()
    model = load_model(options.model, threads=options.threads, context_length=2048)
    bench = Bench(model)
    first = bench.costs.seconds(1)
    curve: Any = " ".join(f"{rows}:{bench.costs.seconds(rows) / first:.2f}" for rows in range(1, MAX_DEPTH + 2))
    print(f"plain step {1e3 * first:.1f} ms; cost by rows {curve}")
    if options.mode == "scripted":
        scripted(bench, options.tokens)
    elif options.mode == "edits":
        edits(bench, options.count)
    else:
        books(bench, sorted(options.texts.glob("*.txt")), options.count)
    model.close()


if __name__ == "__main__":
    main()
