"""What predictions of first tokens are worth, as metrics: engines are asked when somebody asks."""

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from localinfer.engine.engine import EngineStats


class TtftMetrics(Collector):
    """Counts, and quantiles of the latest 512 predictions whose first token came. engines: by the model's name."""

    def __init__(self, registry: CollectorRegistry, engines: "Callable[[], Mapping[str, EngineStats]]") -> None:
        self._engines = engines
        registry.register(self)

    def describe(self) -> list[Metric]:
        """Nothing: registering must not ask engines."""
        return []

    def collect(self) -> Iterator[Metric]:
        """What engines tell now."""
        predicted = CounterMetricFamily(
            "localinfer_ttft_predictions", "First tokens that were predicted, for an objective", labels=["model"]
        )
        refused = CounterMetricFamily(
            "localinfer_ttft_refusals", "Requests refused for what was predicted", labels=["model"]
        )
        ratio = Metric("localinfer_ttft_prediction_ratio", "Time to first token over the predicted one", "summary")
        error = Metric("localinfer_ttft_prediction_error_seconds", "How far the two are apart", "summary")
        for model, stats in self._engines().items():
            predicted.add_metric([model], stats.ttft.num_predicted)
            refused.add_metric([model], stats.ttft.num_refused)
            for metric, quantiles in ((ratio, stats.ttft.ratio_quantiles), (error, stats.ttft.error_quantiles)):
                for quantile, value in quantiles.items():
                    metric.add_sample(metric.name, {"model": model, "quantile": f"{quantile:g}"}, value)
        yield from (predicted, refused, ratio, error)
