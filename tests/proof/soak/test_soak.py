"""The short forms of the long runs, and that they find what is wrong."""

import math
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.proof.soak import cache_site, clients, hostile, sessions_site
from tests.proof.soak.asks import draw_asks
from tests.proof.soak.cache_site import CacheSite
from tests.proof.soak.clients import Clients
from tests.proof.soak.cold_answers import ColdAnswers
from tests.proof.soak.connection import CutError, parsed
from tests.proof.soak.hostile import Hostile
from tests.proof.soak.kills import Kills
from tests.proof.soak.process_figures import trend
from tests.proof.soak.site import ViolationError
from tests.proof.soak.tabs import REPLY, Tabs
from tests.support.warm_python import WarmPython


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are copies of one that has imported the package."""
    for module in (cache_site, sessions_site, clients, hostile):
        monkeypatch.setattr(module, "subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": WarmPython}))


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="needs inotify and /proc")


@linux_only
@pytest.mark.usefixtures("copies")
def test_killed_processes_lose_nothing() -> None:
    said: list[str] = []
    kills = Kills(1, ["cache", "sessions"], said.append)
    assert kills.run(2), said
    assert kills.num_kills == 2


@linux_only
@pytest.mark.usefixtures("copies")
def test_clients_that_come_and_leave_get_right_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each model answers two dozen requests alone first.
    monkeypatch.setattr(clients, "_TALKING", clients._TALKING[1:])
    said: list[str] = []
    crowd = Clients(1, 4, said.append)
    assert crowd.run(1.0), said
    assert crowd.tally.finished.total() > 5


@linux_only
@pytest.mark.usefixtures("copies")
def test_server_stays_small_and_well_under_hostile_connections() -> None:
    said: list[str] = []
    strangers = Hostile(1, 8, said.append, most_bytes=1 << 20, judges_time=False)
    assert strangers.run(1.0), said
    assert strangers.probes and strangers.growth


def test_wrong_answer_and_lost_session_are_found(tmp_path: Path) -> None:
    with ColdAnswers() as cold:
        site = CacheSite(tmp_path, cold)
        answer = cold.complete("Once", seed=0, max_tokens=24, temperature=0.8, logprobs=1)
        site._note({"event": "asked", "prompt": "Once", "seed": 0, "answer": answer, "cached": 1})
        wrong = answer._replace(logprobs=(answer.logprobs[0] + 1e-12, *answer.logprobs[1:]))
        with pytest.raises(ViolationError, match="is not the cold"):
            site._note({"event": "asked", "prompt": "Once", "seed": 0, "answer": wrong, "cached": 1})
        site.check()
        site._note({"event": "saving", "name": "first", "ids": [1, 2]})
        site.check()
        site._note({"event": "saved", "name": "first"})
        with pytest.raises(ViolationError, match="first is gone"):
            site.check()
        for index in range(site.most_temporaries + 1):
            (site.folder / f".{index:012x}.tmp").touch()
        with pytest.raises(ViolationError, match="pile up"):
            site.check_temporaries()


def test_growth_is_told_from_noise() -> None:
    noise = random.Random(1)
    times = [float(second) for second in range(1000)]
    still = [1e9 + noise.gauss(0, 30e6) for _ in times]
    assert trend(times, still).is_noise
    growing = trend(times, [value + 200e3 * second for value, second in zip(still, times, strict=True)])
    assert not growing.is_noise
    assert growing.per_hour == pytest.approx(720e6, rel=0.1)
    assert abs(growing.per_hour - 720e6) < 4 * growing.error_per_hour


def test_memory_of_models_that_come_and_go_is_noise() -> None:
    """Values that depend on those of a minute before; growth of two fifths of their mean over the run is found."""
    noise = random.Random(2)
    times = [float(second) for second in range(1350)]
    alarms = found = 0
    for _ in range(40):
        held, values = 0.0, []
        for _ in times:
            held = held * math.exp(-1 / 60) + noise.gauss(0, 2.7e6)
            values.append(200e6 + held)
        alarms += not trend(times, values).is_noise
        found += not trend(times, [value + 80e6 / 1350 * at for at, value in zip(times, values, strict=True)]).is_noise
    assert alarms <= 3 and found >= 32


def test_answers_are_read_as_they_come() -> None:
    whole = (
        b"HTTP/1.1 100 \r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\n{\r\n\r\n1\r\n}\r\n0\r\n\r\n"
    )
    assert all(parsed(whole[:end]) is None for end in range(len(whole) - 4))
    found = parsed(whole)
    assert found is not None and found == (200, b"{\r\n}")
    with pytest.raises(CutError, match="without a length"):
        parsed(b"HTTP/1.1 200 OK\r\n\r\n")


def test_replies_are_alike_streamed_and_whole() -> None:
    asks = draw_asks(random.Random(1), ["one"])
    ask = next(ask for ask in asks if ask.kind == "chat")
    usage = b'"usage": {"prompt_tokens": 3, "completion_tokens": 2}'
    whole = b'{"choices": [{"message": {"content": "Hi"}, "finish_reason": "stop"}], %s}' % usage
    parts = (
        b'data: {"choices": [{"delta": {"content": "H"}, "finish_reason": null}]}\n\n  data: {"choices": [{"delta": '
    )
    parts += b'{"content": "i"}, "finish_reason": "stop"}]}\n\ndata: {"choices": [], %s}\n\ndata: [DONE]\n\n' % usage
    assert ask.read(whole, streamed=False) == ask.read(parts, streamed=True)


def test_lost_doubled_and_falsely_marked_messages_are_found() -> None:
    def kept(*messages: dict[str, object]) -> list[dict[str, object]]:
        return [{"id": "1", "messages": list(messages)}]

    sent = {"id": "a", "role": "user", "content": "Message 1", "parent": None}
    reply = {"id": "b", "role": "assistant", "content": REPLY, "parent": "a", "finish_reason": "stop"}
    tabs = Tabs(1, 2, lambda _: None)
    tabs.sent["a"] = ("Message 1", "1")
    assert tabs.judge_store(kept(sent, reply)) == []
    assert tabs.judge_store(kept(sent, {**reply, "finish_reason": "stopped", "content": "A rep"})) == []
    wrong = {
        "is not in the store": kept(),
        "is there 2 times": kept(sent, {**sent, "id": "c"}, reply),
        "is said to be cut off": kept(sent, {**reply, "content": "A", "finish_reason": "interrupted"}),
        "never ends": kept(sent, {**reply, "finish_reason": None}),
        "is not what the model said": kept(sent, {**reply, "content": REPLY[1:]}),
        "follows is not there": kept(sent, {**reply, "parent": "x"}),
    }
    for problem, messages in wrong.items():
        assert any(problem in one for one in tabs.judge_store(messages)), problem
    tabs.cut.add("b")
    assert tabs.judge_store(kept(sent, {**reply, "content": "A", "finish_reason": "interrupted"})) == []
    tabs.deleted.add("1")
    assert tabs.judge_store(kept()) == []
