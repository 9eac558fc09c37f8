"""Limits, turns and places over all replicas: the accounts that one ingress has, or several share."""

import asyncio

import pytest

from localinfer.apps.fleet.accounts import Accounts
from localinfer.apps.fleet.dispatch import AGING_SECONDS, Asked, Dispatcher, Place
from localinfer.apps.fleet.placement import Placement
from localinfer.apps.server.transport.http import ApiError
from localinfer.apps.server.transport.settings import AccessToken, Quota, ServerSettings
from localinfer.engine.admission import Owner


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Fleet:
    """A dispatcher, and the requests that it has given places, in order."""

    def __init__(self, replicas: int = 2, places: int = 2, chooses: bool = True, **settings: object) -> None:
        made = ServerSettings(**settings)  # type: ignore[arg-type]
        self.clock = Clock()
        placement = Placement(places, most=made.max_generations)
        self.dispatcher = Dispatcher(made, placement, expected=replicas, chooses=chooses, clock=self.clock)
        self.dispatcher.set_replicas([f"r{number}" for number in range(replicas)])
        self.given: list[Place] = []

    def ask(self, token: str, number: int = 0, count: int = 1, priority: int = 0, running: int | None = None) -> Place:
        owner = Owner(token, running)
        asked = Asked(token, owner, count, priority, (hash((token, number)),) * 3)
        self.clock.now += 0.001
        return self.dispatcher.ask(asked, self.given.append)

    def names(self) -> list[str]:
        return [place.token for place in self.given]


def tokens(*names: str, **limits: int) -> dict[str, object]:
    return {"tokens": tuple(AccessToken(name, f"sk-{name}", quota=Quota(**limits)) for name in names)}


def test_no_replica_has_more_than_its_places_and_the_rest_waits_in_turns():
    fleet = Fleet(replicas=2, places=2)
    of_a = [fleet.ask("a", number) for number in range(8)]
    assert [place.is_running for place in of_a] == [True] * 4 + [False] * 4
    assert sorted(place.replica for place in of_a[:4]) == ["r0", "r0", "r1", "r1"]
    of_b = [fleet.ask("b", number) for number in range(2)]
    # One text of who has none is sent beyond them: its engine takes the place from who has several.
    assert [place.is_running for place in of_b] == [True, False]
    fleet.dispatcher.leave(of_a[0])
    fleet.dispatcher.leave(of_a[1])
    fleet.dispatcher.leave(of_a[2])
    # It came last, and its owner has the fewest.
    assert of_b[1].is_running
    assert [place.is_running for place in of_a[4:]] == [True] + [False] * 3
    assert fleet.dispatcher.num_waiting == 3


def test_places_of_owners_with_one_text_each_are_taken_from_none():
    fleet = Fleet(replicas=1, places=2, **tokens("a", "b", "c"))
    assert fleet.ask("a").is_running and fleet.ask("b").is_running
    waiting = fleet.ask("c")
    assert not waiting.is_running
    fleet.dispatcher.leave(fleet.given[0])
    assert waiting.is_running


def test_the_most_urgent_goes_first_and_who_has_waited_too_long_before_all():
    fleet = Fleet(replicas=1, places=1)
    first = fleet.ask("a")
    late, urgent = fleet.ask("b", priority=3), fleet.ask("c", priority=1)
    fleet.dispatcher.leave(first)
    assert fleet.given[-1] is urgent
    for _ in range(2):
        fleet.ask("d", priority=1)
    fleet.clock.now += AGING_SECONDS
    fleet.dispatcher.leave(urgent)
    assert fleet.given[-1] is late


def test_a_more_urgent_text_is_sent_beyond_the_places_as_its_engine_makes_way_for_it():
    fleet = Fleet(replicas=1, places=2, max_generations=3)
    for number in range(2):
        fleet.ask("a", number, priority=5)
    assert fleet.ask("b", priority=0).is_running
    with pytest.raises(ApiError, match="of at most 3"):
        fleet.ask("b", priority=0)


def test_texts_of_all_replicas_together_are_refused_beyond_the_most_of_each_times_their_number():
    fleet = Fleet(replicas=4, places=6, max_generations=6)
    for number in range(24):
        fleet.ask("a", number)
    with pytest.raises(ApiError) as refused:
        fleet.ask("a", 24)
    assert (refused.value.status, refused.value.code, refused.value.headers["retry-after"]) == (429, "queue_full", "1")
    fleet.dispatcher.leave(fleet.given[0])
    fleet.ask("a", 24)
    # Fewer replicas, fewer texts; what was taken on stays.
    fleet.dispatcher.set_replicas(["r0"])
    with pytest.raises(ApiError, match="of at most 6"):
        fleet.ask("a", 25)
    # As on one server a token has its first text whatever others have asked for.
    fleet.ask("b")


def test_a_token_runs_and_queues_as_many_as_it_may_over_all_replicas():
    fleet = Fleet(replicas=4, places=4, **tokens("a", "b", max_running=3, max_queued=2))
    places = [fleet.ask("a", number, running=3) for number in range(5)]
    assert [place.is_running for place in places] == [True] * 3 + [False] * 2
    with pytest.raises(ApiError, match="3 may be generated and 2 wait"):
        fleet.ask("a", 9, running=3)
    assert fleet.ask("b", running=3).is_running
    # One that waits behind its own limit keeps nobody else from a place.
    fleet.dispatcher.leave(places[3])
    fleet.dispatcher.leave(places[0])
    assert places[4].is_running


@pytest.mark.parametrize("chooses", [True, False])
def test_what_leaves_gives_back_all_that_it_had(chooses):
    fleet = Fleet(replicas=3, places=3, chooses=chooses)
    places = [fleet.ask("ab"[number % 2], number, count=1 + number % 3) for number in range(20)]
    fleet.dispatcher.resize(places[0], 3)
    fleet.dispatcher.move(places[1])
    for place in [*places, places[0]]:
        fleet.dispatcher.leave(place)
    dispatcher = fleet.dispatcher
    assert dispatcher.num_waiting == 0
    assert [dispatcher.placement.running(f"r{number}") for number in range(3)] == [0, 0, 0]
    assert not dispatcher._present and not dispatcher._running and not dispatcher._owners
    assert dispatcher._num_present == dispatcher._num_running == 0


def test_what_was_taken_on_moves_to_another_replica_though_it_is_full():
    fleet = Fleet(replicas=2, places=1)
    one, other, waiting = (fleet.ask("a", number) for number in range(3))
    fleet.dispatcher.move(one)
    assert one.replica == other.replica
    # The one that it left has a place, but is only given one once it is known to live.
    assert fleet.dispatcher.placement.running("r0") + fleet.dispatcher.placement.running("r1") == 2
    fleet.dispatcher.leave(other)
    assert waiting.is_running


def test_until_replicas_are_known_serve_chooses_them():
    fleet = Fleet(replicas=0, places=2)
    fleet.dispatcher._set_count(1)
    places = [fleet.ask("a", number) for number in range(3)]
    assert [(place.is_running, place.replica) for place in places] == [(True, ""), (True, ""), (False, "")]
    fleet.dispatcher.set_replicas(["x"])
    assert places[2].replica == "x"


def test_several_ingresses_hold_the_limits_of_one():
    made = Fleet(replicas=4, places=4, requests_per_minute=10, **tokens("a"))
    accounts = Accounts(made.dispatcher, made.clock)

    async def flood() -> list[int]:
        statuses = []
        for number in range(80):
            ingress = f"i{number % 3}"
            opened = await accounts.open(ingress, number, "a", Asked("a", "a"))
            statuses.append(200 if opened.refusal is None else opened.error().status)
            accounts.close(ingress, number, 5)
        return statuses

    assert sorted(asyncio.run(flood())) == [200] * 10 + [429] * 70


def test_tokens_are_reserved_by_several_ingresses_as_by_one_and_given_back():
    made = Fleet(replicas=4, places=4, tokens_per_minute=100, **tokens("a"))
    accounts = Accounts(made.dispatcher, made.clock)

    async def flood() -> list[bool]:
        taken = []
        for number in range(6):
            await accounts.open(f"i{number % 3}", number, "a", Asked("a", "a"))
            reserved = accounts.reserve(f"i{number % 3}", number, 30, 30)
            taken.append(reserved.refusal is None)
        for number in range(6):
            accounts.close(f"i{number % 3}", number, 10 if taken[number] else 0)
        return taken

    assert asyncio.run(flood()) == [True] * 3 + [False] * 3
    assert made.dispatcher.limiter.headers("a")["x-ratelimit-remaining-tokens"] == "70"


def test_a_client_that_leaves_while_it_waits_ends_its_call_and_its_place():
    made = Fleet(replicas=1, places=1)
    accounts = Accounts(made.dispatcher, made.clock)

    async def leave() -> None:
        await accounts.open("i", 1, "a", Asked("a", "a"))
        waiting = asyncio.ensure_future(accounts.open("i", 2, "a", Asked("a", "a")))
        await asyncio.sleep(0)
        assert not waiting.done()
        accounts.close("i", 2, 0)
        await waiting
        assert made.dispatcher.num_waiting == 0

    asyncio.run(leave())


def test_requests_of_an_ingress_that_is_gone_or_forgot_them_are_given_up():
    made = Fleet(replicas=1, places=4)
    accounts = Accounts(made.dispatcher, made.clock)

    async def run() -> None:
        for number in range(2):
            await accounts.open("gone", number, "", Asked("", "x"))
            await accounts.open("here", number, "", Asked("", "x"))
        accounts.report("here", ("r0",), frozenset((1,)))
        assert made.dispatcher.placement.running("r0") == 4
        made.clock.now += 11.0
        accounts.report("here", ("r0",), frozenset((1,)))
        assert made.dispatcher.placement.running("r0") == 1

    asyncio.run(run())
