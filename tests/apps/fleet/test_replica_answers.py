"""Replicas that answer are not kept waiting by one that says nothing, and their metrics say who is missing."""

import asyncio
from collections.abc import Awaitable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from localinfer.apps.fleet.relay import SILENT_SECONDS
from localinfer.apps.fleet.replica import BATCH_SECONDS, HEARTBEAT_SECONDS
from localinfer.apps.fleet.replica_answers import (
    AnsweredReplicas,
    Answers,
    answers_within,
    merged_metrics,
    summed_metrics,
)


async def after(turns: int, answer: str) -> str:
    """Answers when the event loop has gone round so often."""
    for _ in range(turns):
        await asyncio.sleep(0)
    return answer


async def failure() -> str:
    raise RuntimeError("the replica has died")


def test_every_answer_is_awaited_at_one_time() -> None:
    met = asyncio.Barrier(3)

    async def meet(name: str) -> str:
        await met.wait()
        return name

    found = asyncio.run(answers_within([meet("a"), meet("b"), meet("c")], 60.0))
    assert (sorted(found.found), found.num_missing) == (["a", "b", "c"], 0)
    assert asyncio.run(answers_within([], 60.0)) == Answers([], 0)


def test_silent_and_failed_replicas_are_missing_and_no_longer_asked() -> None:
    ended: list[bool] = []

    async def silence() -> str:
        try:
            return await asyncio.Future[str]()
        finally:
            ended.append(True)

    async def ask() -> Answers[str]:
        found = await answers_within([after(3, "a"), silence(), failure(), after(0, "b")], 0.05)
        await asyncio.sleep(0)
        return found

    found = asyncio.run(ask())
    assert (sorted(found.found), found.num_missing, ended) == (["a", "b"], 2, [True])


def test_an_answer_that_is_enough_ends_the_wait() -> None:
    never: Awaitable[str]

    async def ask() -> Answers[str]:
        nonlocal never
        never = asyncio.get_running_loop().create_future()
        return await answers_within([after(0, "no"), never, after(5, "yes")], 3600.0, lambda answer: answer == "yes")

    found = asyncio.run(ask())
    assert (found.found, found.num_missing) == (["no", "yes"], 1)


def samples(text: str) -> dict[str, float]:
    return {
        sample.labels.get("replica", "missing"): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_say_which_of_the_known_replicas_did_not_answer() -> None:
    replicas = AnsweredReplicas()
    assert samples(replicas.exposition(["a"], 1, 2.0)) == {"missing": 1, "a": 1}, "it has no name yet"
    assert samples(replicas.exposition(["a", "b"], 0, 2.0)) == {"missing": 0, "a": 1, "b": 1}
    text = replicas.exposition(["a"], 1, 2.0)
    assert samples(text) == {"missing": 1, "a": 1, "b": 0}
    assert "Replicas that did not answer within 2 s" in text
    assert samples(replicas.exposition(["a"], 2, 2.0)) == {"missing": 2, "a": 1, "b": 0}
    assert samples(replicas.exposition(["a", "c"], 0, 2.0)) == {"missing": 0, "a": 1, "c": 1}, "b is removed"
    assert samples(replicas.exposition([], 1, 2.0)) == {"missing": 1}, "either may be removed"
    assert samples(replicas.exposition(["a", "c"], 0, 2.0)) == {"missing": 0, "a": 1, "c": 1}


def test_metrics_of_several_replicas_are_one_text_with_each_family_once() -> None:
    text = '# HELP a Of a.\n# TYPE a counter\na{x="1"} 2.0\na_created 5.0\n# HELP b Of b.\n# TYPE b gauge\nb 3.0\n'
    merged = merged_metrics({"r1": text, "r2": text}).splitlines()
    assert merged.count("# TYPE a counter") == 1
    assert 'a{replica="r1",x="1"} 2.0' in merged
    assert 'b{replica="r2"} 3.0' in merged
    assert merged.index('a{replica="r2",x="1"} 2.0') < merged.index("# HELP b Of b.")


def test_metrics_of_several_replicas_can_be_read_as_those_of_one_server() -> None:
    families = {
        "a_total counter": ['a_total{x="1"} %d'],
        "a_created gauge": ["a_created 1%d"],
        "h histogram": ['h_bucket{le="1.0"} %d', "h_sum 0.%d"],
        "kv_perc gauge": ["kv_perc 0.%d"],
        "n_max counter": ["n_max %d"],
        "q summary": ['q{quantile="0.5"} 3%d', "q_count %d"],
    }
    texts = [
        "".join(
            f"# TYPE {kind}\n" + "".join(f"{line % number}\n" for line in lines) for kind, lines in families.items()
        )
        for number in (2, 4)
    ]
    found = {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(summed_metrics(texts))
        for sample in family.samples
    }
    assert found == {
        ("a_total", "1"): 6,
        ("a_created",): 12,
        ("h_bucket", "1.0"): 6,
        ("h_sum",): pytest.approx(0.6),
        ("kv_perc",): pytest.approx(0.3),
        ("n_max_total",): 4,
        ("q_count",): 6,
    }


def test_a_lost_replica_is_noticed_in_time_for_another_to_go_on() -> None:
    assert 2 * HEARTBEAT_SECONDS < SILENT_SECONDS <= 3.0
    assert BATCH_SECONDS <= 0.1
