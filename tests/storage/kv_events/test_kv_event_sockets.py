"""KV cache events over real sockets: subscribers that are there, come late or are slow know what the cache holds."""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import localinfer
from localinfer.errors import ClosedError, MissingPackageError, RequestError
from localinfer.llm import LLM
from localinfer.storage.kv_events import CacheEvents, KVEventPublisher, KVEventsConfig
from localinfer.system import extras
from tests.storage.kv_events.known_blocks import blocks_of
from tests.support.inside import engine_of
from tests.support.limits import wait_until

zmq = pytest.importorskip("zmq", reason="subscribers need pyzmq")

from tests.storage.kv_events.subscribers import ArrayBatch, Subscriber  # noqa: E402

ANY = "tcp://127.0.0.1:*"
WORDS = "the cat sat on a mat and the dog ran to an old house by the sea where it was dark".split()


@contextmanager
def publishing(**options: Any) -> Iterator[KVEventPublisher]:
    with KVEventPublisher(KVEventsConfig(endpoint=ANY, **options)) as publisher:
        yield publisher


@contextmanager
def subscribed(publisher: KVEventPublisher, **options: Any) -> Iterator[Subscriber]:
    """A subscriber that is known to get what is published from now on."""
    subscriber = Subscriber(publisher.endpoint, publisher.config.topic, **options)
    try:
        yield subscriber
    finally:
        subscriber.close()


def connected(publisher: KVEventPublisher, subscriber: Subscriber, events: CacheEvents) -> int:
    """Publish until the subscriber gets it; ZMQ tells nobody when that begins. Returns the next batch's number."""
    while subscriber.next(0.02) is None:
        events.cleared()
    while subscriber.next(0.1) is not None:
        pass
    return subscriber.last + 1


@pytest.fixture
def llms() -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def load(**options: Any) -> LLM:
        made.append(localinfer.load(threads=1, may_measure=False, **options))
        return made[-1]

    yield load
    for llm in made:
        llm.close()


def held(llm: LLM) -> set[Any]:
    with engine_of(llm).exclusive_cache() as cache:
        return blocks_of(cache)


def ask(llm: LLM, chooser: random.Random) -> None:
    opening = " ".join(chooser.choices(WORDS[:3], k=2)) * 20
    rest = " ".join(chooser.choices(WORDS, k=chooser.randrange(5, 150)))
    salt = chooser.choice((None, None, "team"))
    llm.complete(f"{opening} {rest}", max_tokens=2, ignore_eos=True, cache_salt=salt)


def test_subscribers_know_what_the_cache_holds_while_texts_are_stored_and_evicted(llms: Callable[..., LLM]) -> None:
    with publishing(replay_endpoint=ANY, topic="kv@pod@demo") as publisher:
        llm = llms(kv_events=publisher, kv_memory=1 << 20)
        chooser = random.Random(1)
        ask(llm, chooser)
        # The first batches went to nobody, or may have.
        with subscribed(publisher) as subscriber:
            assert publisher.replay_endpoint is not None
            assert subscriber.replay(publisher.replay_endpoint, 0, b"kv@pod@demo")[0] == 0
            for _ in range(25):
                ask(llm, chooser)

            def knows() -> bool:
                while subscriber.next(0.01) is not None:
                    assert subscriber.topic == b"kv@pod@demo"
                if subscriber.missing is not None:
                    subscriber.replay(publisher.replay_endpoint, subscriber.missing, b"kv@pod@demo")
                return set(subscriber.known.blocks.values()) == held(llm)

            assert wait_until(knows)
            assert subscriber.known.num_removed > 50 and len(subscriber.known.blocks) > 5
            assert {salt != b"" for salt, _ in subscriber.known.blocks.values()} == {False, True}
            # As a router asks: which blocks of a prompt are there.
            plain = [ids for salt, ids in held(llm) if not salt]
            longest = max(plain, key=len)
            assert set(localinfer.block_hashes(longest)) <= subscriber.known.blocks.keys()
            assert not set(localinfer.block_hashes(longest, cache_salt="other")) & subscriber.known.blocks.keys()
            llm.close()
            assert wait_until(lambda: subscriber.next(0.01) is not None and subscriber.known.num_cleared == 1)
            assert not subscriber.known.blocks


def test_a_model_that_is_loaded_again_goes_on_in_the_same_stream(llms: Callable[..., LLM]) -> None:
    with publishing(replay_endpoint=ANY) as publisher, subscribed(publisher) as subscriber:
        for _ in range(2):
            llm = llms(kv_events=publisher)
            ask(llm, random.Random(2))
            there = held(llm)
            llm.close()
        assert there
        assert publisher.replay_endpoint is not None
        subscriber.replay(publisher.replay_endpoint, 0)
        assert wait_until(
            lambda: subscriber.known.num_cleared == 2 or not subscriber.replay(publisher.replay_endpoint, 0)
        )
        assert subscriber.known.num_stored == 2 * len(there) and not subscriber.known.blocks


def test_the_model_that_was_loaded_last_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with publishing(replay_endpoint=ANY) as publisher, subscribed(publisher) as subscriber:
        former, latter = publisher.attach(), publisher.attach()
        assert "loaded last" in caplog.text
        former.removed([1])
        latter.cleared()
        former.close()
        latter.close()
        latter.cleared()
        publisher.attach().cleared()
        assert publisher.replay_endpoint is not None
        assert wait_until(lambda: subscriber.replay(publisher.replay_endpoint, 0) and subscriber.known.num_cleared == 3)
        assert not subscriber.known.num_removed


def test_a_slow_subscriber_stops_nobody_and_finds_again_what_it_missed() -> None:
    # One block of 100 kB: the sockets of the system hold some of them.
    ids = np.arange(1 << 20, (1 << 20) + 20_000, dtype=np.int32)
    with (
        publishing(replay_endpoint=ANY, hwm=2) as publisher,
        subscribed(publisher, block_size=ids.size, rcvhwm=1, rcvbuf=4096) as slow,
        subscribed(publisher, block_size=ids.size) as quick,
    ):
        assert publisher.replay_endpoint is not None
        events = publisher.attach()
        for each in (slow, quick):
            connected(publisher, each, events)
        for block in range(60):
            events.stored([block], None, ids, b"")
            while not (quick.known.num_stored > block or quick.missing):
                assert quick.next() is not None
            events.removed([block])
        # It learns from what comes next that there was more.
        while slow.missing is None:
            events.cleared()
            while slow.next(0.05) is not None:
                pass
        assert slow.known.num_stored < 60
        slow.replay(publisher.replay_endpoint, slow.missing)
        assert slow.missing is None
        assert slow.known.num_stored == slow.known.num_removed == 60


def test_a_late_subscriber_gets_no_more_than_the_last_batches() -> None:
    with publishing(replay_endpoint=ANY, buffer_steps=3) as publisher, subscribed(publisher) as subscriber:
        events = publisher.attach()
        number = connected(publisher, subscriber, events)
        for index in range(8):
            events.cleared()
            subscriber.read_to(number + index)
        assert publisher.replay_endpoint is not None
        assert subscriber.replay(publisher.replay_endpoint, 0) == [number + 5, number + 6, number + 7]
        assert subscriber.replay(publisher.replay_endpoint, number + 7) == [number + 7]
        assert subscriber.replay(publisher.replay_endpoint, number + 99) == []


def test_wrong_replay_requests_are_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    with publishing(replay_endpoint=ANY) as publisher, subscribed(publisher) as subscriber:
        publisher.attach().cleared()
        assert publisher.replay_endpoint is not None
        with zmq.Context() as context, context.socket(zmq.DEALER) as asking:
            asking.linger = 0
            asking.connect(publisher.replay_endpoint)
            for request in ([b"x"], [b"", b"1"], [b"x", bytes(8)], [b"", bytes(8), b""], [b"", bytes(5000)]):
                asking.send_multipart(request)
            assert wait_until(lambda: caplog.text.count("no number of 8 bytes") == 4)
            assert not asking.poll(20)
        assert wait_until(lambda: subscriber.replay(publisher.replay_endpoint, 0) == [0])


def test_events_are_arrays_for_older_subscribers(llms: Callable[..., LLM]) -> None:
    with publishing(replay_endpoint=ANY, encoding="array") as publisher:
        llm = llms(kv_events=publisher)
        ask(llm, random.Random(3))
        with subscribed(publisher, batch=ArrayBatch) as subscriber:
            assert publisher.replay_endpoint is not None
            assert wait_until(lambda: subscriber.replay(publisher.replay_endpoint, 0))
            assert set(subscriber.known.blocks.values()) == held(llm) != set()


def test_publisher_can_connect_to_a_subscriber_that_listens() -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.linger = 0
        subscriber.subscribe(b"")
        port = subscriber.bind_to_random_port("tcp://127.0.0.1")
        config = KVEventsConfig(endpoint=f"tcp://127.0.0.1:{port}", connects=True)
        with KVEventPublisher(config) as publisher:
            events = publisher.attach()

            def arrives() -> bool:
                events.cleared()
                return bool(subscriber.poll(20))

            assert wait_until(arrives)


def test_load_takes_an_address_and_leaves_nothing_behind(llms: Callable[..., LLM]) -> None:
    with publishing() as other:
        taken = other.endpoint
        threads = threading.active_count()
        with pytest.raises(RequestError, match=f"{taken}: Address.*in use.*kv_events"):
            llms(kv_events=taken)
        assert threading.active_count() == threads
    for _ in range(2):
        llm = llms(kv_events=taken)
        assert sum(thread.name == "localinfer-kv-events" for thread in threading.enumerate()) == 1
        llm.close()
    assert not any(thread.name.startswith("localinfer-kv") for thread in threading.enumerate())
    with pytest.raises(RequestError, match="kv_events is 5557; give an address"):
        llms(kv_events=5557)
    with pytest.raises(RequestError, match="kv_events: endpoint is 'nowhere'"):
        llms(kv_events="nowhere")


def test_a_load_that_fails_closes_its_sockets() -> None:
    with pytest.raises(RequestError):
        localinfer.load(threads=1, kv_events=ANY, speculation="mtp")
    assert not any(thread.name.startswith("localinfer-kv") for thread in threading.enumerate())


def test_a_publisher_that_was_closed_before_its_model_keeps_nothing(llms: Callable[..., LLM]) -> None:
    publisher = KVEventPublisher(KVEventsConfig(endpoint=ANY))
    llm = llms(kv_events=publisher)
    publisher.close()
    publisher.close()
    ask(llm, random.Random(4))
    llm.close()
    assert publisher._queue.empty()
    with pytest.raises(ClosedError, match="make another"):
        llms(kv_events=publisher)


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "_found", set())
    monkeypatch.setattr(extras, "_is_there", lambda module: module != "zmq")
    with pytest.raises(MissingPackageError, match=r"pip install 'localinfer\[events\]'"):
        localinfer.load(kv_events=ANY)


@pytest.mark.parametrize(
    "endpoint",
    ["tcp://*:5557", "tcp://0.0.0.0:5557", "tcp://[::]:5557", "tcp://192.168.1.5:5557", "tcp://eth0:1", "tcp://node:1"],
)
def test_addresses_that_others_can_reach_are_refused_unless_opened(endpoint: str) -> None:
    with pytest.raises(RequestError, match="other machines.*allows_remote"):
        KVEventsConfig(endpoint=endpoint)
    with pytest.raises(RequestError, match="other machines"):
        KVEventsConfig(replay_endpoint=endpoint)
    assert KVEventsConfig(endpoint=endpoint, allows_remote=True).endpoint == endpoint


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "tcp://localhost:1", "tcp://[::1]:*", "ipc:///tmp/kv"])
def test_addresses_of_this_machine_are_taken(endpoint: str) -> None:
    assert KVEventsConfig(endpoint=endpoint).endpoint == endpoint


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"endpoint": "127.0.0.1:5557"}, "give an address of ZMQ"),
        ({"endpoint": "tcp://127.0.0.1"}, "give an address of ZMQ"),
        ({"endpoint": "tcp://127.0.0.1:65536"}, "give an address of ZMQ"),
        ({"endpoint": "inproc://kv"}, "give an address of ZMQ"),
        ({"endpoint": "ipc://"}, "give an address of ZMQ"),
        ({"endpoint": None}, "give an address of ZMQ"),
        ({"endpoint": "tcp://*:5557", "connects": True}, "give the subscriber's host"),
        ({"replay_endpoint": "tcp://127.0.0.1:5557"}, "another port"),
        ({"topic": 5}, "topic is 5"),
        ({"buffer_steps": 0}, "buffer_steps is 0"),
        ({"hwm": 0}, "hwm is 0"),
        ({"encoding": "json"}, "'map' or 'array'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        KVEventsConfig(**options)
