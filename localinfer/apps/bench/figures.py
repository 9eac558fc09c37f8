"""Figures of samples: medians, percentiles and ratios; goodput and knee of a load; the model's part of a record."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localinfer.errors import RequestError

if TYPE_CHECKING:
    from localinfer.apps.show.describe import FileDescription

Record = dict[str, Any]

PERCENTS = (50, 95, 99)
_NEAR = 0.7
"""Least share of a ceiling at which a phase is bound by it."""
_NOTABLE = 0.1
"""Share of a phase's bytes or multiplications from which on a part is named."""
_LEAST_GAIN = 0.6
"""Time of a token verified with three others, over one alone, below which drafts can pay."""
_LEAST_BEND = 0.05
"""Minimum distance of a knee from the curve's chord, in units of the scaled axes: less is noise."""


def percentile(values: Iterable[float], percent: int) -> float:
    """The nearest-rank percentile (NumPy's "inverted_cdf") of at least one value."""
    ordered = sorted(values)
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def summarize(values: Sequence[float]) -> Record:
    """The median, and the values."""
    return {"median": statistics.median(values), "values": list(values)}


def spread(values: Sequence[float]) -> Record | None:
    """Percentiles, and the values; None without values."""
    if not values:
        return None
    return {**{f"p{percent}": percentile(values, percent) for percent in PERCENTS}, "values": list(values)}


def timing_figures(
    prompt: int, prefills: Sequence[float], decodes: Sequence[Sequence[float]], verified: Mapping[int, float]
) -> Record:
    """Rates, inter-token latencies, and what verifying several tokens costs over one, if that was measured.

    prefills: seconds of each prompt of `prompt` tokens. decodes: seconds of each token of each repetition. verified:
    seconds by the number of tokens.
    """
    intervals = [seconds for decode in decodes for seconds in decode]
    return {
        "prefill_tokens_per_second": summarize([prompt / seconds for seconds in prefills]),
        "decode_tokens_per_second": summarize([len(decode) / sum(decode) for decode in decodes]),
        "itl_p50_seconds": percentile(intervals, 50),
        "itl_p99_seconds": percentile(intervals, 99),
        "verification_cost": {str(size): seconds / verified[1] for size, seconds in verified.items() if size > 1},
    }


def compare(ours: Record, peer: Record) -> Record:
    """Ratios, above 1 where `ours` is better: of the medians, and the lowest and highest of pairs of repetitions."""
    ratios: Record = {}
    for name, value in ours.items():
        other = peer.get(name)
        if not value or not other or name in ("version", "tokens", "verification_cost"):
            continue
        power = 1 if name.endswith("_per_second") else -1
        if isinstance(value, dict):
            each = [(a / b) ** power for a, b in zip(value["values"], other["values"], strict=True)]
            ratio = (value["median"] / other["median"]) ** power
            ratios[name] = {"ratio": ratio, "lowest": min(each), "highest": max(each)}
        else:
            ratios[name] = {"ratio": (value / other) ** power}
    return ratios


def find_walls(ours: Record, machine: Record, *, free_threads: int) -> Record:
    """The ceiling that bounds decode and prefill, the share of it that was reached, and what would move the phase.

    ours: localinfer's figures, whose shares are of the ceilings of `machine`, measured in the same run. free_threads:
    cores that no thread of this run used. Returns, by phase: wall ("memory" or "arithmetic", the one that more is
    reached of), reached, is_near (the phase is at it), read_share, multiply_share, moves (sentences).
    """
    found: Record = {}
    threads = [f"more threads: {free_threads} of this machine's cores were not used"] if free_threads > 0 else []
    for phase in ("decode", "prefill"):
        read, multiply = ours[f"{phase}_read_share"], ours[f"{phase}_multiply_share"]
        wall, reached = max(("memory", read), ("arithmetic", multiply), key=lambda one: one[1])
        moves = list(threads) if wall == "arithmetic" or reached < _NEAR else []
        if phase == "decode":
            moves += _decode_moves(ours)
        elif wall == "memory":
            moves += ["a smaller type of weights", "a longer prompt, whose tokens share each read of the weights"]
        else:
            moves += ["a prompt that begins like a former one, whose part is not computed again", "a smaller model"]
            if ours["prefill_attention_share"] > _NOTABLE:
                moves += ["a shorter prompt: attention grows with the square of its length"]
        if reached < _NEAR:
            moves += [
                "fewer other programs beside it; `localinfer bench roofline` shows which operations take the time"
            ]
        found[phase] = {
            "wall": wall,
            "reached": reached,
            "is_near": reached >= _NEAR,
            "read_share": read,
            "multiply_share": multiply,
            "read_bytes_per_second": machine["read_bytes_per_second"],
            "multiply_adds_per_second": machine["multiply_adds_per_second"],
            "moves": moves,
        }
    return found


def _decode_moves(ours: Record) -> list[str]:
    """Ways to have a token read or compute less, by the figures of a decode."""
    moves = ["a smaller type of weights (`localinfer quantize`)"]
    if ours["kv_bytes_per_token"] > _NOTABLE * (ours["kv_bytes_per_token"] + ours["weight_bytes_per_token"]):
        moves += ["a quantized cache (--kv-type q8_0)", "a shorter context (--kv-window)"]
    cost = ours["verification_cost"]["4"]
    if cost < _LEAST_GAIN * 4:
        moves += [f"drafts: four tokens verified at once take {cost:.2f} x one (`localinfer bench speculation`)"]
        moves += ["several requests at once, which share each read of the weights"]
    return moves


def check_context(description: "FileDescription", needed: int) -> None:
    """Raise RequestError if the model was trained for fewer than `needed` tokens."""
    trained = description.sizes.get("context_length")
    if isinstance(trained, int) and needed > trained:
        raise RequestError(
            f"the measurement takes {needed} tokens, but the model was trained for {trained}; reduce --prompt, "
            "--context and --decode"
        )


def model_record(description: "FileDescription") -> Record:
    """The model's part of a record."""
    names = ("path", "architecture", "num_bytes", "num_parameters", "bits_per_weight")
    return {
        **{name: getattr(description, name) for name in names},
        "types": [share.type for share in description.types],
    }


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Client-side times of one streamed reply, in seconds on one clock."""

    sent: float
    first_byte: float
    """Of the event stream."""
    tokens: tuple[float, ...]
    """Times of the events with text; a token that ends inside a character has none."""
    ended: float
    num_tokens: int
    """Generated tokens, as counted by the server."""
    prompt_tokens: int
    text: str

    @property
    def time_to_first_token_seconds(self) -> float:
        """From sending to the first text."""
        return self.tokens[0] - self.sent

    @property
    def intervals(self) -> list[float]:
        """Seconds between consecutive events with text."""
        return [after - before for before, after in zip(self.tokens, self.tokens[1:], strict=False)]

    @property
    def seconds_per_token(self) -> float:
        """The request's time per token, comparable between long and short replies."""
        return (self.ended - self.sent) / self.num_tokens

    def tokens_until(self, moment: float) -> float:
        """Tokens received by a moment."""
        return self.num_tokens * sum(time <= moment for time in self.tokens) / len(self.tokens)


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that was refused, or whose reply was lost or incomplete."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Objective:
    """A service level objective (SLO): limits of time to first token and mean inter-token latency, in seconds."""

    first_token_seconds: float
    interval_seconds: float

    def is_met(self, request: RequestTimes) -> bool:
        """True if a reply is within both limits."""
        mean = (request.tokens[-1] - request.tokens[0]) / max(1, request.num_tokens - 1)
        return request.time_to_first_token_seconds <= self.first_token_seconds and mean <= self.interval_seconds


Outcome = RequestTimes | Failure


def compare_texts(outcomes: Sequence[Outcome], again: Sequence[Outcome]) -> Record:
    """Count texts that were received both times; list the indices of those that differ, and the reasons of failures."""
    pairs = list(zip(outcomes, again, strict=True))
    failures = [outcome.reason for pair in pairs for outcome in pair if isinstance(outcome, Failure)]
    texts = [
        (number, first.text, second.text)
        for number, (first, second) in enumerate(pairs)
        if isinstance(first, RequestTimes) and isinstance(second, RequestTimes)
    ]
    different = [number for number, text, other in texts if text != other]
    return {"compared": len(texts), "different": different, "failures": failures}


def level_record(
    concurrency: int, outcomes: Sequence[Outcome], objective: Objective, *, began: float, busy_until: float
) -> Record:
    """The figures of one number of concurrent streams.

    began, busy_until: the period in which every stream had a request; rates refer to it.
    Goodput is the rate of requests that met the objective, and their share of all requests.
    """
    whole = [outcome for outcome in outcomes if isinstance(outcome, RequestTimes)]
    failures = [outcome.reason for outcome in outcomes if isinstance(outcome, Failure)]
    rate = sum(request.tokens_until(busy_until) for request in whole) / (busy_until - began)
    num_tokens = sum(request.num_tokens for request in whole)
    requests_per_second = rate * len(whole) / num_tokens if num_tokens else 0.0
    num_good = sum(map(objective.is_met, whole))
    return {
        "concurrency": concurrency,
        "requests": len(outcomes),
        "failures": failures,
        "seconds": busy_until - began,
        "prompt_tokens": sum(request.prompt_tokens for request in whole),
        "completion_tokens": num_tokens,
        "tokens_per_second": rate,
        "requests_per_second": requests_per_second,
        "goodput_requests_per_second": requests_per_second * num_good / len(whole) if whole else 0.0,
        "goodput_share": num_good / len(outcomes),
        "first_byte_seconds": spread([request.first_byte - request.sent for request in whole]),
        "time_to_first_token_seconds": spread([request.time_to_first_token_seconds for request in whole]),
        "itl_seconds": spread([interval for request in whole for interval in request.intervals]),
        "seconds_per_token": spread([request.seconds_per_token for request in whole]),
    }


def knee(points: Sequence[tuple[float, float]]) -> int | None:
    """The index of the point of a throughput-latency curve after which latency grows faster than throughput.

    With both axes scaled to the curve's range, it is the point furthest from the chord between the first and the last
    one, on the side of more throughput for less latency. None for fewer than three points, and if no distance exceeds
    a twentieth of an axis.
    Source: the criterion of Kneedle (Satopaa et al., 2011, section III).
    """
    if len(points) < 3:
        return None
    xs, ys = _scaled([x for x, _ in points]), _scaled([y for _, y in points])
    across, up = xs[-1] - xs[0], ys[-1] - ys[0]
    length = math.hypot(across, up)
    if length == 0:
        return None
    distances = [((x - xs[0]) * up - (y - ys[0]) * across) / length for x, y in zip(xs, ys, strict=True)]
    furthest = max(range(len(points)), key=distances.__getitem__)
    return furthest if distances[furthest] > _LEAST_BEND else None


def _scaled(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]
