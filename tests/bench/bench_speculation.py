"""What speculation brings on a model of real size: `python -m tests.bench.bench_speculation MODE MODEL [options]`.

No large model's texts are needed: the model computes and samples as ever, and each sampled token is then replaced by
the next one of a reference text (teacher-forced replay). So time is that of a real model, and acceptance that of real
text.

scripted: drafts that are right with a known chance. edits: texts with small changes (`edit_tasks`), by n-grams and with
the source as prediction. books: free text, from text files given by --texts. new: text that the model itself makes
and never made before, nothing replaced, with drafts and without in turns of ten tokens; drafts should cost nothing.
"""

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import localinfer
from localinfer.engine.engine import Engine
from localinfer.engine.sampling.sampler import MAX_DRAFT_TOKENS, Sampler, SamplingParams, SamplingPlan
from localinfer.engine.scheduler import Generation
from localinfer.engine.speculation.costs import VerificationCosts
from localinfer.engine.speculation.ngram import NgramDrafter
from localinfer.engine.speculation.verify import Speculation, SpeculationRecord
from localinfer.loading.drafters import make_speculation
from localinfer.models.load.loader import Model, load_model
from localinfer.types import TokenIds
from tests.bench.edit_tasks import edit_tasks

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
class Race:
    """How many times faster than plain decoding a replay was, in all and after the settled tokens; what drafts did."""

    speed: float
    settled_speed: float
    record: SpeculationRecord


class Bench:
    """One model, whose generations say what they are told."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.costs = make_speculation("ngram", model, None).costs
        self._sampler = ReplayingSampler(model.config.vocab_size)

    def speculation(self, drafter: NgramDrafter) -> Speculation:
        seconds = [self.costs.seconds(rows) for rows in range(1, MAX_DRAFT_TOKENS + 2)]
        return Speculation(VerificationCosts(seconds), ngram=drafter, model=None)

    def race(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        drafter: NgramDrafter,
        *,
        prediction: Sequence[int] = (),
        stride: int = 1,
    ) -> Race:
        """Replay one output after one prompt with drafts and without, in turns, so that both meet the same machine.

        stride: tokens with drafts for each one without.
        """
        self._sampler.reference = np.array([*prompt, *output], np.int32)
        engines = [Engine(Kept(self.model), speculation=drafting) for drafting in (self.speculation(drafter), None)]
        params = SamplingParams(temperature=0.0)
        generations = []
        for engine in engines:
            engine._runner.sampler = self._sampler
            generation = engine.generate(prompt, params, max_tokens=len(output), prediction=prediction)
            next(generation)
            generations.append(generation)
        drafted, plain = generations
        times, plain_times = [], []
        while (seconds := _step_seconds(drafted)) is not None:
            times.append(seconds)
            if len(times) % stride == 0:
                plain_times.append(_step_seconds(plain) or 0.0)
        record = drafted.record.speculation
        assert record is not None, "it speculated"
        settled = min(SETTLING_TOKENS, len(times) // 2)
        for generation, engine in zip(generations, engines, strict=True):
            generation.close()
            engine.close()
        return Race(
            _mean(plain_times) / _mean(times), _mean(plain_times[settled // stride :]) / _mean(times[settled:]), record
        )


def _step_seconds(generation: Generation) -> float | None:
    began = time.perf_counter()
    return None if next(generation, None) is None else time.perf_counter() - began


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


class Kept:
    """A model that outlives an engine."""

    def __init__(self, model: Model) -> None:
        self.config, self.program, self.kv_layout = model.config, model.program, model.kv_layout

    def close(self) -> None:
        """Stay open."""


def scripted(bench: Bench, num_tokens: int) -> None:
    """Speed over plain decoding by the chance that a drafted token is right."""
    generator = np.random.default_rng(3)
    ids = generator.integers(300, bench.model.config.vocab_size - 300, num_tokens + 33).tolist()
    print(f"{'chance':>8}{_HEAD}")
    for chance in (0.0, 0.6, 0.8, 0.95):
        drafter = ScriptedDrafter(np.array(ids, np.int32), chance)
        print(f"{chance:>8}{_row(bench.race(ids[:32], ids[32:], drafter))}", flush=True)


def edits(bench: Bench, skipped: int, num_tasks: int) -> None:
    """Speed over plain decoding on edits, by n-grams alone and with the source as prediction."""
    tokenizer = bench.model.tokenizer
    assert tokenizer is not None, "the texts have to be tokenized"
    print(f"{'task':<52}{'predicted':>10}{_HEAD}")
    worst = [math.inf, math.inf]
    for task in edit_tasks()[skipped : skipped + num_tasks]:
        prompt = tokenizer.encode(task.prompt)
        output = tokenizer.encode(task.result, add_special=False)
        source = tokenizer.encode(task.source, add_special=False)
        ngram = bench.race(prompt, output, NgramDrafter(), stride=4)
        predicted = bench.race(prompt, output, NgramDrafter(), prediction=source, stride=4)
        worst = [min(worst[0], ngram.speed), min(worst[1], predicted.speed)]
        print(f"{task.name:<52}{predicted.speed:>10.2f}{_row(ngram)}", flush=True)
    print(f"{'worst':<52}{worst[1]:>10.2f}{worst[0]:>8.2f}")


def books(bench: Bench, texts: Sequence[Path], skipped: int, num_texts: int) -> None:
    """Speed over plain decoding on chapters: what was never read before should not be slower."""
    tokenizer = bench.model.tokenizer
    assert tokenizer is not None, "the texts have to be tokenized"
    print(f"{'text':<40}{_HEAD}")
    worst = math.inf
    for index in range(skipped, skipped + num_texts):
        path = texts[index % len(texts)]
        text = path.read_text("utf-8", errors="replace")
        start = len(text) * (1 + index // len(texts)) // 4
        ids = tokenizer.encode(text[start : start + 4000])
        race = bench.race(ids[:256], ids[256:456], NgramDrafter())
        worst = min(worst, race.settled_speed)
        print(f"{path.name:<40}{_row(race)}", flush=True)
    print(f"{'worst':<48}{worst:>9.2f}")


def new(path: Path, num_texts: int, num_tokens: int, threads: int | None) -> None:
    """Speed over plain decoding on new text: of the times of ten tokens, the ratio of medians and of trimmed means."""
    times: list[list[float]] = [[], []]
    drafted = 0
    options: Any = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True}
    with (
        localinfer.load(path, threads=threads) as drafting,
        localinfer.load(path, threads=threads, speculation=None) as plain,
    ):
        for seed in range(num_texts):
            streams = [
                llm.stream("Once upon a time", max_tokens=num_tokens, seed=seed, **options) for llm in (drafting, plain)
            ]
            for stream in streams:
                next(stream)
            for turn in range((num_tokens - 1) // 10):
                for index in (0, 1) if turn % 2 else (1, 0):
                    began = time.perf_counter()
                    for _ in range(10):
                        next(streams[index])
                    times[index].append(time.perf_counter() - began)
            drafted += streams[0].stats.drafted_tokens
            for stream in streams:
                stream.close()
    with_drafts, without = map(np.array, times)
    median = float(np.median(without))
    means = [float(np.minimum(values, 3 * median).mean()) for values in (with_drafts, without)]
    print(f"{'median':>8}{'mean':>8}{'us a token':>12}{'drafted':>9}")
    ratio = median / float(np.median(with_drafts))
    print(f"{ratio:>8.3f}{means[1] / means[0]:>8.3f}{1e5 * median:>12.1f}{drafted:>9}")


_HEAD = f"{'all':>8}{'settled':>9}{'tokens/pass':>13}  accepted by place, %"


def _row(race: Race) -> str:
    record = race.record
    places = zip(record.accepted, record.drafted, strict=True)
    shares = " ".join(f"{100 * accepted / drafted:.0f}" for accepted, drafted in places if drafted)
    passes = record.decoded_tokens / record.forward_passes
    return f"{race.speed:>8.2f}{race.settled_speed:>9.2f}{passes:>13.2f}  {shares}"


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=["scripted", "edits", "books", "new"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--texts", type=Path, help="folder of .txt files, for books")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--count", type=int, default=20, help="how many texts or tasks")
    parser.add_argument("--skip", type=int, default=0, help="how many texts or tasks to leave out before those")
    options = parser.parse_args()
    if options.mode == "new":
        new(options.model, options.count, options.tokens, options.threads)
        return
    model = load_model(options.model, threads=options.threads, context_length=None)
    bench = Bench(model)
    first = bench.costs.seconds(1)
    curve: Any = " ".join(f"{rows}:{bench.costs.seconds(rows) / first:.2f}" for rows in range(1, MAX_DRAFT_TOKENS + 2))
    print(f"plain step {1e3 * first:.1f} ms; cost by rows {curve}")
    if options.mode == "scripted":
        scripted(bench, options.tokens)
    elif options.mode == "edits":
        edits(bench, options.skip, options.count)
    else:
        books(bench, sorted(options.texts.glob("*.txt")), options.skip, options.count)
    model.close()


if __name__ == "__main__":
    main()
