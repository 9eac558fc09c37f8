"""A Ray Serve application: an ingress that relays requests, and replicas of an engine that answer them."""

import importlib
import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.request_router import RequestRouter

from localinfer.apps.fleet.accounts import IngressOptions, SharedAccounts
from localinfer.apps.fleet.options import PrefillOptions, ReplicaOptions, checked_load, with_threads, without_limits
from localinfer.apps.fleet.replica import PREFILL, EngineReplica
from localinfer.apps.fleet.serve_ingress import ENGINE, PrefixRouter, ServeIngress
from localinfer.apps.server.transport.settings import ServerSettings
from localinfer.arguments import check_number, check_path, shown
from localinfer.engine.admission import EngineLimits
from localinfer.errors import RequestError
from localinfer.storage.response_store import ResponseStoreOptions

_NO_RESPONSES = ResponseStoreOptions(max_bytes=0)
_MANY_REQUESTS = 10_000
"""Requests wait in the ingress, in turns, and not in Serve's queue, which has none."""
_HEALTH_PERIOD, _HEALTH_TIMEOUT = 5.0, 10.0
_MOST_REPLICAS = 100_000


def app(
    model: str | os.PathLike[str] | None = None,
    *,
    name: str | None = None,
    replicas: int = 1,
    autoscaling: Mapping[str, Any] | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    ingress_cpus: float = 0.1,
    ingress_replicas: int = 1,
    prefill_replicas: int = 0,
    prefill_cpus: float | None = None,
    prefill_threshold: int | None = None,
    prefill_deadline: float | None = None,
    routing: str = "prefix",
    drain_seconds: float = 600.0,
    health_check_period_s: float = _HEALTH_PERIOD,
    health_check_timeout_s: float = _HEALTH_TIMEOUT,
    settings: ServerSettings | None = None,
    **load: Any,
) -> serve.Application:
    """A Serve application around `localinfer.load`, to be given to `serve.run` or `serve run`.

    model: of `localinfer.load`; each replica loads it on its own node. name: what clients call it, None for the file's.
    replicas: how many, each a process. autoscaling: in place of that, Serve's `AutoscalingConfig`, such as
        {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 4}.
    cpus, gpus: of each replica, as Ray counts them; it computes with so many threads, one at least, unless `threads`
        says otherwise.
    ingress_replicas, ingress_cpus: processes that take requests and relay answers, and what each takes; several share
        one further process, which holds limits, turns and what is known of replicas.
    prefill_replicas: further replicas, which compute prompts for the others and generate nothing: prompts of which
        `prefill_threshold` tokens or more are new (256), or not there after `prefill_deadline` seconds (120), are
        computed where they came to instead. They have the same options, `prefill_cpus` (as many as `cpus`) and `gpus`;
        prompts are handed over in `disk_cache_folder`, which all replicas reach.
    routing: "prefix" sends a prompt where most of its beginning was computed, "balanced" leaves it to Serve; or the
        module and class of another `ray.serve.request_router.RequestRouter`, such as "my_package.routers.MyRouter".
    drain_seconds: what running replies get to finish when a replica is removed.
    health_check_period_s, health_check_timeout_s: how often Serve asks a replica whether it lives, and how long that
        may take; three failures in a row end it. The ingress ends one that is silent while it answers after 18 s.
    settings: of the server: tokens, hosts, limits. Limits of tokens hold for all replicas together; `max_generations`
        and `num_slots` are those of each. Responses are not kept unless they say where; a folder that all replicas can
        reach shares them.
    load: further options of `localinfer.load`.
    Raises: RequestError.
    """
    if model is not None:
        check_path("model", model, ", or None for the demo model")
    if name is not None and not (isinstance(name, str) and name):
        raise RequestError(f"name is {shown(name)}; give a text, or None for the file's name")
    settings = ServerSettings(kept_responses=_NO_RESPONSES, serves_page=False) if settings is None else settings
    if not isinstance(settings, ServerSettings):
        raise RequestError(f"settings is {shown(settings)}; give localinfer's ServerSettings, or None")
    if settings.compacts_chats:
        raise RequestError(
            "settings has compacts_chats, which replicas cannot: one that resumes a lost reply knows its prompt, and "
            "not the summary in it; leave it out, or let the client compact (`/v1/responses/compact`)"
        )
    _check_numbers(
        replicas=(replicas, 1, int),
        cpus=(cpus, 0, float),
        gpus=(gpus, 0, float),
        ingress_cpus=(ingress_cpus, 0, float),
        ingress_replicas=(ingress_replicas, 1, int),
        drain_seconds=(drain_seconds, 0, float),
        health_check_period_s=(health_check_period_s, 0.1, float),
        health_check_timeout_s=(health_check_timeout_s, 0.1, float),
    )
    _check_routing(routing)
    expected = replicas if autoscaling is None else _checked_autoscaling(autoscaling, routing)
    checked_load(load)
    apart = PrefillOptions(prefill_replicas, prefill_cpus, prefill_threshold, prefill_deadline)
    served = without_limits(settings)
    options = apart.asking(ReplicaOptions(None if model is None else str(model), name, served, load))
    shared: dict[str, Any] = {
        "max_ongoing_requests": _MANY_REQUESTS,
        "health_check_period_s": health_check_period_s,
        "health_check_timeout_s": health_check_timeout_s,
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
    limits = load.get("limits") or EngineLimits()
    told = IngressOptions(
        settings, min(limits.max_running, settings.max_generations), expected, chooses=routing == "prefix"
    )
    actor = {"num_cpus": ingress_cpus}
    accounts = None
    if ingress_replicas > 1:
        accounts = serve.deployment(
            SharedAccounts, name="accounts", num_replicas=1, ray_actor_options=actor, **shared
        ).bind(told)
    ingress = serve.deployment(
        serve.ingress()(ServeIngress), name="ingress", num_replicas=ingress_replicas, ray_actor_options=actor, **shared
    )
    engines = engine.bind(with_threads(options, cpus), prefill, prefill_replicas)
    return ingress.bind(engines, told, prefill, accounts)


def _check_numbers(**given: tuple[Any, float, type[int] | type[float]]) -> None:
    """Check numbers, each with the least that it may be and its kind. Raises: RequestError."""
    for name, (value, least, kind) in given.items():
        check_number(name, value, least, _MOST_REPLICAS, kind=kind)


def _check_routing(routing: object) -> None:
    """Raise RequestError for what is no way of routing."""
    if routing in ("prefix", "balanced"):
        return
    wanted = 'give "prefix", "balanced", or the module and class of a router'
    if not isinstance(routing, str) or "." not in routing:
        raise RequestError(f"routing is {shown(routing)}; {wanted}")
    module, _, name = routing.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise RequestError(f"routing is {shown(routing)}, which cannot be imported ({reason:.100}); {wanted}") from None
    if not (isinstance(found, type) and issubclass(found, RequestRouter)):
        raise RequestError(f"routing is {shown(routing)}, which is no ray.serve.request_router.RequestRouter; {wanted}")


def _checked_autoscaling(autoscaling: object, routing: str) -> int:
    """The number of replicas to expect before Serve has named some. Raises: RequestError."""
    wanted = 'give a dict of Serve\'s AutoscalingConfig, such as {"min_replicas": 1, "max_replicas": 4}'
    if not isinstance(autoscaling, Mapping):
        raise RequestError(f"autoscaling is {shown(autoscaling)}; {wanted}")
    unknown = [name for name in autoscaling if name not in AutoscalingConfig.model_fields]
    if unknown:
        raise RequestError(f"autoscaling has {shown(unknown[0])}, which Serve does not know; {wanted}")
    try:
        config = AutoscalingConfig(**autoscaling)
    except Exception as error:
        reason = " ".join(str(error).split())
        raise RequestError(f"autoscaling is refused by Serve ({reason:.200}); {wanted}") from None
    # Only the ingress's own router knows their number.
    return max(1, int(config.min_replicas if routing == "prefix" else config.max_replicas))


def demo() -> serve.Application:
    """Two replicas of the demo model, which fit a machine with two cores."""
    return app(replicas=2, cpus=0.9, threads=1, kv_memory=64 << 20)
