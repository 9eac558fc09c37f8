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
    """Rates, inter-token latencies, and what verifying several tokens costs over one.

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
