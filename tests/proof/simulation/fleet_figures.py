"""What a simulated or measured fleet did, in the figures that both are compared by."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import exp

from localinfer.apps.bench.figures import percentile
from tests.proof.simulation.fleet_memory import Request
from tests.proof.simulation.fleet_replica import INTERVAL_BINS_PER_E, Intervals


@dataclass(frozen=True)
class Objective:
    """Limits of the time to first token, and of the mean time between the tokens of a reply, in seconds."""

    first_token: float = 0.5
    interval: float = 0.05

    def is_met(self, first_token: float, interval: float) -> bool:
        """Whether a reply is within both."""
        return first_token <= self.first_token and interval <= self.interval


@dataclass(frozen=True)
class Figures:
    """Of the requests of a period. hit_rate: cached of shareable tokens. Rates per second of all replicas together.

    goodput: requests within the objective; good_tokens: of their replies. utilization: share of the time in which a
    replica computes.
    """

    requests: int
    seconds: float
    hit_rate: float
    prompt_tokens: int
    cached_tokens: int
    ttft_p50: float
    ttft_p99: float
    interval_p50: float
    interval_p99: float
    tokens_per_second: float
    goodput: float
    good_share: float
    good_tokens_per_second: float
    utilization: float = 0.0

    def cost_per_million(self, price_per_hour: float, replicas: int) -> float:
        """Of a million reply tokens of requests within the objective, in the price's currency; infinite for none."""
        if not self.good_tokens_per_second:
            return float("inf")
        return price_per_hour * replicas / 3600 / self.good_tokens_per_second * 1e6

    def lines(self) -> str:
        """One figure per line."""
        return "\n".join(f"{name:>22} {value:.6g}" for name, value in asdict(self).items())


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it; times in seconds. ended: when its last token came."""

    sent: float
    first_token: float
    ended: float
    prompt: int
    reply: int
    cached: int
    shareable: int

    @property
    def interval(self) -> float:
        """The mean time between two tokens."""
        return (self.ended - self.first_token) / max(1, self.reply - 1)

    @classmethod
    def of(cls, request: Request) -> "Outcome":
        """Of a simulated request that has ended."""
        return cls(
            request.sent,
            request.first_token,
            request.ended,
            request.prompt,
            request.reply,
            request.cached if request.hits < 0 else request.hits,
            request.shareable,
        )


def figures_of(
    outcomes: Sequence[Outcome],
    intervals: tuple[float, float],
    objective: Objective,
    *,
    seconds: float | None = None,
    utilization: float = 0.0,
) -> Figures:
    """Figures of at least one outcome. intervals: p50 and p99 of all times between tokens. seconds: None for the time
    from the first request to the last end."""
    first_tokens = [one.first_token - one.sent for one in outcomes]
    span = seconds or max(one.ended for one in outcomes) - min(one.sent for one in outcomes)
    good = [one for one in outcomes if objective.is_met(one.first_token - one.sent, one.interval)]
    shareable = sum(one.shareable for one in outcomes)
    return Figures(
        requests=len(outcomes),
        seconds=span,
        hit_rate=sum(min(one.cached, one.shareable) for one in outcomes) / shareable if shareable else 1.0,
        prompt_tokens=sum(one.prompt for one in outcomes),
        cached_tokens=sum(one.cached for one in outcomes),
        ttft_p50=percentile(first_tokens, 50),
        ttft_p99=percentile(first_tokens, 99),
        interval_p50=intervals[0],
        interval_p99=intervals[1],
        tokens_per_second=sum(one.reply for one in outcomes) / span,
        goodput=len(good) / span,
        good_share=len(good) / len(outcomes),
        good_tokens_per_second=sum(one.reply for one in good) / span,
        utilization=utilization,
    )


def interval_percentiles(intervals: Intervals, percents: Iterable[int] = (50, 99)) -> tuple[float, ...]:
    """Percentiles of counted intervals, as accurate as their bins; 0 without any."""
    total = sum(intervals.bins.values())
    found = []
    for percent in percents:
        left = total * percent / 100
        value = 0.0
        for key, count in sorted(intervals.bins.items()):
            value = exp((key + 0.5) / INTERVAL_BINS_PER_E)
            left -= count
            if left <= 0:
                break
        found.append(value)
    return tuple(found)
