"""A Ray Serve application: an ingress that relays requests, and replicas of an engine that answer them."""

import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from localinfer.errors import RequestError
from localinfer.persistence.response_store import ResponseStoreOptions
from localinfer.ray.engine_replica import EngineReplica
from localinfer.ray.ingress import Ingress
from localinfer.ray.prefill_deployment import PREFILL
from localinfer.ray.prefill_options import PrefillOptions, with_threads
from localinfer.ray.prefix_router import PrefixRouter
from localinfer.ray.replica_models import ReplicaOptions
from localinfer.server.transport.settings import ServerSettings

ENGINE = "engine"
"""The name of the deployment whose replicas hold the model."""
_NO_RESPONSES = ResponseStoreOptions(max_bytes=0)
_MANY_REQUESTS = 10_000
"""An ingress only waits: how many requests are taken on is for the engines to say."""


def app(
    model: str | os.PathLike[str] | None = None,
    *,
    name: str | None = None,
    replicas: int = 1,
    autoscaling: Mapping[str, Any] | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    ingress_cpus: float = 0.1,
    prefill_replicas: int = 0,
    prefill_cpus: float | None = None,
    prefill_threshold: int | None = None,
    prefill_deadline: float | None = None,
    routing: str = "prefix",
    drain_seconds: float = 600.0,
    settings: ServerSettings | None = None,
    **load: Any,
) -> serve.Application:
    """A Serve application around `localinfer.load`, to be given to `serve.run` or `serve run`.

    model: of `localinfer.load`; each replica loads it on its own node. name: what clients call it, None for the file's.
    replicas: how many, each a process. autoscaling: in place of that, Serve's `AutoscalingConfig`, such as
        {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 4}.
    cpus, gpus: of each replica, as Ray counts them; it computes with so many threads, one at least, unless `threads`
        says otherwise. ingress_cpus: of the ingress, which waits most of its time.
    prefill_replicas: further replicas, which compute prompts for the others and generate nothing: prompts of which
        `prefill_threshold` tokens or more are new (256), or not there after `prefill_deadline` seconds (120), go on
        where they came to. They have the same options, `prefill_cpus` (as many as `cpus`) and `gpus`; prompts are
        handed over in `disk_cache_folder`, which all replicas reach.
    routing: "prefix" sends a prompt where most of its beginning was computed, "balanced" leaves it to Serve; or the
        module and class of another `ray.serve.request_router.RequestRouter`, such as "my_package.routers.MyRouter".
    drain_seconds: what running replies get to finish when a replica is removed.
    settings: of the server in each replica: tokens, hosts, limits. Responses are not kept unless they say where; a
        folder that all replicas can reach shares them.
    load: further options of `localinfer.load`.
    Raises: RequestError.
    """
    if routing not in ("prefix", "balanced") and "." not in routing:
        raise RequestError(f'routing is {routing!r}; give "prefix", "balanced", or the module and class of a router')
    if autoscaling is None and replicas < 1:
        raise RequestError(f"replicas is {replicas}; give 1 or more, or autoscaling with min_replicas")
    settings = ServerSettings(kept_responses=_NO_RESPONSES, serves_page=False) if settings is None else settings
    apart = PrefillOptions(prefill_replicas, prefill_cpus, prefill_threshold, prefill_deadline)
    options = apart.asking(ReplicaOptions(None if model is None else str(model), name, settings, load))
    shared: dict[str, Any] = {
        "max_ongoing_requests": settings.max_generations,
        "graceful_shutdown_timeout_s": drain_seconds,
        "graceful_shutdown_wait_loop_s": 0.2,
    }
    scale: dict[str, Any] = (
        {"num_replicas": replicas} if autoscaling is None else {"autoscaling_config": {**autoscaling}}
    )
    if routing != "balanced":
        path = f"{PrefixRouter.__module__}.{PrefixRouter.__qualname__}" if routing == "prefix" else routing
        scale["request_router_config"] = RequestRouterConfig(request_router_class=path)
    engine = serve.deployment(
        EngineReplica,
        name=ENGINE,
        ray_actor_options={"num_cpus": cpus, "num_gpus": gpus},
        **shared,
        **scale,
    )
    prefill = None
    if prefill_replicas:
        prefill_cpus = cpus if prefill_cpus is None else prefill_cpus
        asked = serve.deployment(
            EngineReplica,
            name=PREFILL,
            num_replicas=prefill_replicas,
            ray_actor_options={"num_cpus": prefill_cpus, "num_gpus": gpus},
            **shared,
        )
        prefill = asked.bind(with_threads(apart.asked(options), prefill_cpus))
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="ingress",
        num_replicas=1,
        ray_actor_options={"num_cpus": ingress_cpus},
        **{**shared, "max_ongoing_requests": _MANY_REQUESTS},
    )
    engines = engine.bind(with_threads(options, cpus), prefill, prefill_replicas)
    return ingress.bind(engines, settings.max_body_bytes, prefill)


def demo() -> serve.Application:
    """Two replicas of the demo model, which fit a machine with two cores."""
    return app(replicas=2, cpus=0.9, threads=1, kv_memory=64 << 20)
