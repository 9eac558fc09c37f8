"""Options of an application, which are checked before any replica starts."""

from typing import Any

import pytest

import localinfer.ray
from localinfer.apps.fleet.options import checked_load, without_limits
from localinfer.apps.server.transport.settings import AccessToken, Quota, ServerSettings
from localinfer.engine.admission import EngineLimits
from localinfer.errors import RequestError
from tests.apps.fleet.serve_process import has_ray

needs_ray = pytest.mark.skipif(not has_ray(), reason="needs `pip install 'localinfer[ray]'`")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"typo": 1}, "typo is no option of app, nor of localinfer.load; localinfer.load takes device"),
        ({"thread": 2}, "give threads"),
        ({"progress": print}, "progress is no option"),
        ({"kv_type": "x"}, "kv_type is 'x'; give one of"),
        ({"threads": "2"}, "threads is '2'; it must be a whole number"),
        ({"context_length": 0}, "context_length is 0"),
        ({"speculation": "x"}, "give one of 'auto', 'ngram'"),
        ({"speculation": "draft"}, "there is no draft model"),
        ({"limits": 4}, "give EngineLimits"),
        ({"disk_cache": -1}, "disk_cache is -1"),
        ({"priority": "high"}, "priority is 'high'"),
        ({"verify": "no"}, "verify is 'no'"),
        ({"kv_events": open}, "cannot be sent|kv_events"),
    ],
)
def test_options_of_load_are_refused_with_the_way_out(given: dict[str, Any], words: str) -> None:
    if given == {"kv_events": open}:
        given = {"kv_events": lambda: None}
    with pytest.raises(RequestError, match=words):
        checked_load(given)


def test_options_of_load_that_replicas_need_not_share_a_machine_for_are_taken() -> None:
    checked_load({})
    checked_load(
        {"threads": 2, "kv_type": "q8_0/q4_0", "limits": EngineLimits(max_running=4), "draft": "/of/a/node.gguf"}
    )


def test_replicas_leave_the_limits_of_tokens_to_the_ingress_and_keep_the_rest() -> None:
    quota = Quota(requests_per_minute=1, tokens_per_minute=2, max_running=3, max_queued=4, min_priority=5)
    given = ServerSettings(
        tokens=(AccessToken("a", "sk-a", quota=quota),), requests_per_minute=9, running_per_token=2, isolates_cache=True
    )
    served = without_limits(given)
    assert served.quotas["a"] == Quota(min_priority=5)
    # As with any tokens that have names.
    assert served.quotas["b"] == Quota(min_priority=0)
    assert served.isolates_cache and served.access_tokens[0].value == "sk-a"


@needs_ray
# Of Ray's own use of pydantic.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"typo": 1}, "typo is no option of app"),
        ({"replicas": "2"}, "replicas is '2'; it must be a whole number"),
        ({"replicas": 0}, "replicas is 0"),
        ({"cpus": -1}, "cpus is -1; it must be a number"),
        ({"gpus": None}, "gpus is None"),
        ({"ingress_replicas": 0}, "ingress_replicas is 0"),
        ({"drain_seconds": "x"}, "drain_seconds is 'x'"),
        ({"health_check_period_s": 0}, "health_check_period_s is 0"),
        ({"routing": "x"}, "routing is 'x'; give"),
        ({"routing": "no.Such"}, "which cannot be imported"),
        ({"routing": "os.path"}, "which is no ray.serve.request_router.RequestRouter"),
        ({"autoscaling": 3}, "autoscaling is 3"),
        ({"autoscaling": {"x": 1}}, "which Serve does not know"),
        ({"autoscaling": {"min_replicas": -1}}, "is refused by Serve"),
        ({"settings": 4}, "settings is 4"),
        ({"settings": ServerSettings(compacts_chats=True)}, "compacts_chats, which replicas cannot"),
        ({"model": 4}, "model is 4"),
        ({"name": ""}, "name is ''"),
    ],
)
def test_options_of_an_application_are_refused_with_the_way_out(given: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        localinfer.ray.app(**given)
