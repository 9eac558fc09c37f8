"""The framework notices what goes wrong in a target as what it is: mistakes planted in a toy."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.proof.fuzz.__main__ import main, run_one, table
from tests.proof.fuzz.campaign import Campaign
from tests.proof.fuzz.findings import Finding, read, save
from tests.proof.fuzz.mutation import mutate_bytes, mutate_text, mutate_value, to_json
from tests.proof.fuzz.shrinking import shrink
from tests.proof.fuzz.target import find_target
from tests.proof.fuzz.toy import TARGET, corpus
from tests.proof.fuzz.worker_process import WorkerProcess


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerProcess]:
    with WorkerProcess(TARGET) as process:
        yield process


@pytest.mark.parametrize(
    ("letter", "kind"),
    [
        ("S", "SIGSEGV"),
        ("A", "SIGABRT"),
        ("H", "hang"),
        ("M", "memory"),
        ("K", "KeyError"),
        ("U", "UnclearMessageError"),
        ("E", "UnclearMessageError"),
    ],
)
def test_planted_mistake_is_noticed_as_what_it_is(letter: str, kind: str, worker: WorkerProcess) -> None:
    report = worker.run(b"toy" + letter.encode() + b"..")
    assert report.kind == kind
    assert report.text
    assert worker.run(b"toy...").outcome == "loaded", "the next case has a worker"


def test_refusal_is_no_finding(worker: WorkerProcess) -> None:
    report = worker.run(b"tow...")
    assert (report.outcome.partition("\n")[0], report.kind) == ("refused: CorruptFileError", "")


def test_campaign_finds_and_shrinks_and_counts(tmp_path: Path) -> None:
    told: list[tuple[Finding, Path]] = []
    campaign = Campaign(
        TARGET,
        seed=3,
        seconds=600,
        most_cases=500,
        folder=tmp_path,
        shrink_seconds=3,
        told=lambda *found: told.append(found),
    )
    campaign.run()
    counts = campaign.counts
    assert counts.cases == 500
    assert counts.outcomes["loaded"] and counts.outcomes["refused: CorruptFileError"]
    assert "KeyError" in {kind for kind, _ in campaign.findings}
    wrong = next(path for finding, path in told if finding.kind == "KeyError")
    assert read(wrong) == b"toyK", "every byte that is not needed is gone"
    assert "findings" in table(campaign)
    assert run_one(TARGET, wrong) == 1


def test_command_says_by_its_status_whether_there_are_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["toy", "--cases", "1", "--found", str(tmp_path)]) == 0
    assert "loaded" in capsys.readouterr().out
    sound = tmp_path / "sound.case"
    sound.write_bytes(corpus()[0])
    assert main(["toy", "--case", str(sound)]) == 0
    with pytest.raises(LookupError, match="nothing"):
        find_target("nothing")


def test_long_finding_is_packed_and_read_again(tmp_path: Path) -> None:
    for data in (b"short", b"long" * 5000):
        path = save(Finding("KeyError", "a.py:1", "", data), tmp_path)
        assert read(path) == data
        assert path.stat().st_size < 4096


def test_shrinking_keeps_what_shows_the_mistake() -> None:
    small = shrink(b"a" * 50 + b"xy" + b"b" * 70, lambda data: b"xy" in data, None, seconds=60)
    assert small == b"xy"
    small = shrink(b"12345", lambda data: data != b"0", lambda data: [b"0", data[:1]], seconds=60)
    assert small in (b"", b"1")


def test_mutations_are_decided_by_the_generator() -> None:
    value = {"a": [1, 2.5, "text"], "b": {"c": None, "d": True}}

    def made(seed: int) -> list[object]:
        generator = random.Random(seed)
        return [
            *(mutate_bytes(generator, b"some bytes", [b"other"]) for _ in range(100)),
            *(mutate_text(generator, "some text") for _ in range(100)),
            *(to_json(mutate_value(generator, value, ["e"])) for _ in range(100)),
        ]

    assert made(5) == made(5) != made(6)
    assert value == {"a": [1, 2.5, "text"], "b": {"c": None, "d": True}}
