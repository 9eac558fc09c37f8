"""The fleet model keeps count, agrees with queueing theory where that has an answer, and depends on its seed alone."""

import random
from dataclasses import replace
from math import exp
from statistics import fmean

import pytest

from tests.proof.simulation.fleet import Fleet, FleetOptions, PrefillApart, simulate
from tests.proof.simulation.fleet_costs import StepCosts
from tests.proof.simulation.fleet_figures import interval_percentiles
from tests.proof.simulation.fleet_memory import PrefixMemory, Request
from tests.proof.simulation.fleet_replica import INTERVAL_BINS_PER_E, ReplicaOptions
from tests.proof.simulation.fleet_router import POLICIES
from tests.proof.simulation.fleet_users import Population, Turn, Visit, visits_of
from tests.proof.simulation.fleet_workload import REPLICA_KV_TOKENS, make_workload

PLENTY = 10_000_000


def made_costs(**changes):
    """A token of a prompt takes 1 ms, a step 10 ms, and nothing else takes anything."""
    costs = StepCosts(
        name="made",
        chunk=((1.0, 0.001), (512.0, 0.512)),
        decode=((1.0, 0.01), (16.0, 0.01)),
        chunk_context=0.0,
        decode_context=0.0,
        request=0.0,
        step=0.0,
        token=0.0,
        kv_bytes=1_000,
        max_rows=512,
    )
    return replace(costs, **changes)


def options_of(replicas=2, policy="prefix", kv_tokens=PLENTY, max_running=16, **more):
    return FleetOptions(
        replicas=replicas, policy=policy, replica=ReplicaOptions(kv_tokens=kv_tokens, max_running=max_running), **more
    )


def lone_requests(service, rate, count, seed=1):
    """Visits of one turn each, as a Poisson process; service: prompt and reply tokens from random numbers."""
    numbers = random.Random(seed)
    now, visits = 0.0, []
    for number in range(count):
        now += numbers.expovariate(rate)
        prompt, reply = service(numbers)
        visits.append(Visit(number, now, number, 1, (Turn(0.0, prompt, reply, 0),)))
    return visits


def queue_waits(visits, services):
    """Each one's wait in a queue of one server. Source: Lindley, 1952."""
    waits, wait = [], 0.0
    for before, visit, service in zip(visits, [*visits[1:], visits[-1]], services, strict=True):
        waits.append(wait)
        wait = max(0.0, wait + service - (visit.start_seconds - before.start_seconds))
    return waits


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("apart", [None, PrefillApart(replicas=1)])
def test_every_request_ends_once(policy, apart):
    fleet = Fleet(StepCosts.read("demo"), options_of(4, policy, 6_000, apart=apart))
    visits = list(Population(per_second=4.0, think_seconds=2.0).visits(3, 30.0))
    figures = fleet.run(visits)
    assert figures.requests == fleet.sent == len(fleet.ended) == sum(len(visit.turns) for visit in visits)
    assert len({id(request) for request in fleet.ended}) == fleet.sent
    for request in fleet.ended:
        assert request.sent <= request.first_token <= request.ended
        assert request.computed == request.prompt
        assert request.generated == request.reply
    for replica in [*fleet.replicas, *fleet.prefill_replicas]:
        memory = replica.memory
        assert replica.outstanding == replica.pending_tokens == 0
        assert memory.used_pages <= memory.capacity
        held = sum(text.pages for text in memory.texts.values()) + sum(one.pages for one in memory.systems.values())
        assert held == memory.used_pages
        assert not any(text.users for text in memory.texts.values())


def test_waiting_is_that_of_a_queue_with_constant_service():
    # M/D/1: the mean wait is load * service / (2 * (1 - load)).
    service, load = 0.05, 0.5
    visits = lone_requests(lambda _: (50, 1), load / service, 12_000)
    fleet = Fleet(made_costs(), options_of(1, max_running=1))
    fleet.run(visits)
    waits = [request.first_token - request.sent - service for request in fleet.ended]
    assert waits == pytest.approx(queue_waits(visits, [service] * len(visits)), abs=1e-6)
    assert fmean(waits) == pytest.approx(load * service / (2 * (1 - load)), rel=0.1)


def test_waiting_is_that_of_a_queue_with_random_service():
    # M/G/1, Pollaczek and Khinchine; with geometric replies, near to M/M/1's load * service / (1 - load).
    load, mean = 0.5, 20.0
    visits = lone_requests(lambda numbers: (2, 2 + int(numbers.expovariate(1 / mean))), 1.0, 12_000, seed=3)
    services = [0.002 + 0.01 * (visit.turns[0].reply - 1) for visit in visits]
    first, second = fmean(services), fmean(service**2 for service in services)
    rate = load / first
    visits = [replace(visit, start_seconds=visit.start_seconds / rate) for visit in visits]
    fleet = Fleet(made_costs(), options_of(1, max_running=1))
    fleet.run(visits)
    waits = [request.first_token - request.sent - 0.002 for request in fleet.ended]
    assert waits == pytest.approx(queue_waits(visits, services), abs=1e-6)
    assert fmean(waits) == pytest.approx(rate * second / (2 * (1 - load)), rel=0.1)
    assert fmean(waits) == pytest.approx(load * first / (1 - load), rel=0.15)


def test_a_request_joins_between_two_steps():
    # A reply of 11 tokens runs from 0.1 on; 35 ms later another prompt comes, and is computed after its fourth step.
    visits = [
        Visit(0, 0.0, 0, 1, (Turn(0.0, 100, 11, 0),)),
        Visit(1, 0.135, 1, 1, (Turn(0.0, 16, 2, 0),)),
    ]
    fleet = Fleet(made_costs(), options_of(1))
    fleet.run(visits)
    first, second = sorted(fleet.ended, key=lambda request: request.conversation)
    assert first.first_token == pytest.approx(0.1)
    # Four steps of 10 ms, then one with 16 rows: 17 ms of rows and 9 ms more for the stream.
    assert second.first_token == pytest.approx(0.14 + 0.026)
    assert first.ended == pytest.approx(0.14 + 0.026 + 5 * 0.01)
    assert second.ended == pytest.approx(second.first_token + 0.01)


def test_one_replica_that_never_evicts_finds_all_that_is_shareable():
    visits = visits_of(make_workload(1))
    assert simulate(made_costs(), options_of(1), visits).hit_rate == 1.0


def test_hit_rates_grow_with_memory_and_fall_with_random_replicas():
    visits = visits_of(make_workload(1))
    sizes = (2_048, 4_096, REPLICA_KV_TOKENS, PLENTY)
    by_memory = [simulate(made_costs(), options_of(2, "random", size), visits).hit_rate for size in sizes]
    assert by_memory == sorted(by_memory)
    by_replicas = [simulate(made_costs(), options_of(count, "random"), visits).hit_rate for count in (1, 2, 4, 16)]
    assert by_replicas == sorted(by_replicas, reverse=True)
    assert simulate(made_costs(), options_of(2, "prefix", REPLICA_KV_TOKENS), visits).hit_rate > 0.95
    assert simulate(made_costs(), options_of(2, "random", REPLICA_KV_TOKENS), visits).hit_rate < 0.6


def test_a_seed_is_one_run():
    def run(seed):
        return simulate(
            made_costs(), options_of(8, "two-choices", seed=seed), Population(per_second=2.0).visits(seed, 20)
        )

    assert run(1) == run(1) != run(2)


def test_prompts_computed_elsewhere_hold_up_fewer_tokens():
    visits = list(Population(per_second=0.8, first_tokens=900, think_seconds=2.0).visits(1, 40.0))
    shares = []
    for apart in (None, PrefillApart(replicas=2, least_tokens=64)):
        fleet = Fleet(made_costs(), options_of(4, apart=apart))
        fleet.run(visits)
        # Steps of streams alone take 10 ms.
        long = sum(count for key, count in fleet.intervals.bins.items() if exp(key / INTERVAL_BINS_PER_E) > 0.011)
        shares.append(long / fleet.intervals.bins.total())
    assert shares[1] < shares[0] / 2


def test_memory_evicts_texts_before_system_prompts_and_nothing_that_runs():
    memory = PrefixMemory(20, 32)
    requests = [Request(number, 0, 64, 0, 160, 1, 0) for number in range(3)]
    for request in requests[:2]:
        memory.admit(request)
        request.computed = request.prompt
        memory.publish(request)
        memory.finish(request)
    again = Request(1, 0, 64, 160, 200, 1, 160)
    assert memory.match(again) == 160
    large = Request(9, 0, 64, 0, 64 + 14 * 32, 1, 0)
    assert memory.admit(again) == 160
    assert not memory.has_room(large)
    memory.finish(again)
    # Of three free pages and those of two texts, the one that was used longest ago goes first.
    assert memory.admit(large) == 64
    assert memory.match(Request(0, 0, 64, 160, 200, 1, 160)) == 64
    assert 64 < memory.match(Request(1, 0, 64, 200, 240, 1, 200)) < 200
    with pytest.raises(ValueError, match="give it more memory"):
        PrefixMemory(4, 32).admit(large)


def test_fitted_costs_are_those_that_were_measured():
    costs = made_costs(chunk_context=2e-6, decode_context=3e-6)
    record = {
        "model": "made",
        "chunk": [
            {"rows": rows, "context": context, "seconds": costs.step_seconds(0, 0, rows, rows * context)}
            for rows in (1, 16, 512)
            for context in (0, 256, 896)
        ],
        "decode": [
            {"streams": count, "context": context, "seconds": costs.decode_seconds(count, count * context)}
            for count in (1, 4, 16)
            for context in (0, 256, 896)
        ],
        "server": {"request_seconds": 0.0, "step_seconds": 0.0, "token_seconds": 0.0},
        "kv_bytes_per_token": 1_000,
        "max_rows": 512,
        "page_tokens": 32,
    }
    fitted = StepCosts.from_record(record)
    for streams, context, rows, before in ((3, 999, 0, 0), (0, 0, 100, 5_000), (5, 100, 64, 640)):
        assert fitted.step_seconds(streams, context, rows, before) == pytest.approx(
            costs.step_seconds(streams, context, rows, before)
        )


def test_counted_intervals_give_their_percentiles():
    fleet = Fleet(made_costs(), options_of(1))
    fleet.intervals.add(0.01, 985)
    fleet.intervals.add(0.5, 15)
    assert interval_percentiles(fleet.intervals) == pytest.approx((0.01, 0.5), rel=0.03)
