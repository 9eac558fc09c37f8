"""Replicas that answer are not kept waiting by one that says nothing, and their metrics say who is missing."""

import asyncio
from collections.abc import Awaitable

from prometheus_client.parser import text_string_to_metric_families

from localinfer.ray.replica_answers import AnsweredReplicas, Answers, answers_within


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
