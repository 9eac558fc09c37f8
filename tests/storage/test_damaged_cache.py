"""A cache folder holds what can be made again: whatever became of a file in it costs that file and no prompt."""

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from click.testing import CliRunner

from localinfer.apps.cli.cache import cache_command
from localinfer.errors import SessionFileError
from localinfer.kernels.jit.object_cache import store, stored
from localinfer.llm import LLM
from localinfer.models.load import threads
from localinfer.models.load.threads import get_measurement, put_measurement
from localinfer.storage.prompt_cache import DiskOptions
from tests.engine.fakes import fake_model
from tests.generation.chat.test_history import ask, chatting
from tests.storage.damage import DAMAGES, json_damages
from tests.storage.test_fingerprint import backdate, weights
from tests.storage.test_prompt_cache import FakeIdentity

MINE, OTHERS = {"weights": "mine", "key-value layout": "f16 1"}, {"weights": "others", "key-value layout": "f16 1"}


@dataclass
class Answers:
    """What a model said, and how often it had something to complain of."""

    words: list[str]
    warnings: list[str]


CHATS = (ask("go"), ask("go", "and then", "on"), ask("something longer, of several pages"))


def said(folder: Path, parts: dict[str, str], chats: int = len(CHATS)) -> list[str]:
    """Answers over a cache folder, of chats and what goes on from them, as one process of one model gives them."""
    _, model = chatting("and then")
    with LLM(model, identity=FakeIdentity(parts), disk=DiskOptions(folder)) as llm:  # type: ignore[arg-type]
        return [llm.chat(messages, temperature=0).text for messages in CHATS[:chats]]


@pytest.fixture
def use(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[..., Answers]:
    """Chats over the cache folder of the test."""

    def run(parts: dict[str, str], chats: int = len(CHATS)) -> Answers:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            words = said(tmp_path / "cache", parts, chats)
        return Answers(words, [record.getMessage() for record in caplog.records])

    return run


KINDS = {
    "description": "about.json",
    "page": "*/*.page",
    "chat": "chats/*.chat",
    "shard": "?",
    "chats folder": "chats",
    "fingerprint folder": ".",
}


def targets(folder: Path, kind: str) -> list[Path]:
    """Files, or folders, of a kind, of every model in the cache folder."""
    found = []
    for model in sorted(folder.iterdir()):
        found += [model] if KINDS[kind] == "." else sorted(model.glob(KINDS[kind]))
    return found


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder that is full of what two models left, and what either said when it was empty."""
    folder = tmp_path_factory.mktemp("filled")
    first = said(folder, MINE)
    assert said(folder, OTHERS) == first
    return folder, first


@pytest.fixture
def cold(filled: tuple[Path, list[str]], tmp_path: Path) -> list[str]:
    """What is said with an empty folder; that of the test has what both models left."""
    shutil.copytree(filled[0], tmp_path / "cache")
    return filled[1]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("kind", ["description", "page", "chat"])
def test_damaged_files_cost_no_prompt_and_one_notice_at_most(
    use: Callable[..., Answers], cold: list[str], kind: str, damage: str, tmp_path: Path
) -> None:
    damaged = targets(tmp_path / "cache", kind)
    assert len(damaged) >= 2, "of both models"
    for path in damaged:
        DAMAGES[damage](path)
    for _ in range(2):
        answers = use(MINE)
        assert answers.words == cold
        assert len(answers.warnings) <= 1, answers.warnings
    listed = CliRunner().invoke(cache_command, ["--disk-cache-folder", str(tmp_path)], catch_exceptions=False)
    assert listed.exit_code == 0


@pytest.mark.parametrize("thing", ["file", "link to nothing", "link to itself"])
@pytest.mark.parametrize("kind", ["shard", "chats folder", "fingerprint folder"])
def test_what_stands_where_a_folder_was_costs_no_prompt_and_one_notice_at_most(
    use: Callable[..., Answers], cold: list[str], kind: str, thing: str, tmp_path: Path
) -> None:
    for path in targets(tmp_path / "cache", kind):
        shutil.rmtree(path)
        if thing == "file":
            path.write_bytes(b"no folder")
        else:
            path.symlink_to("nowhere" if thing == "link to nothing" else path.name)
    for _ in range(2):
        answers = use(MINE)
        assert answers.words == cold
        assert len(answers.warnings) <= 1, answers.warnings


def test_description_of_any_other_shape_costs_no_prompt(
    use: Callable[..., Answers], cold: list[str], tmp_path: Path
) -> None:
    paths = targets(tmp_path / "cache", "description")
    example = paths[0].read_bytes()
    for index, (name, text) in enumerate(json_damages(example).items()):
        for path in paths:
            path.write_bytes(text)
        answers = use({"weights": f"new {index}"}, chats=1)
        assert answers.words == cold[:1], name
        assert not answers.warnings, name


def test_links_in_the_folder_are_not_followed_to_files_of_others(
    use: Callable[..., Answers], cold: list[str], tmp_path: Path
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / ("0" * 32)).write_bytes(b"mine")
    (tmp_path / "cache" / "weights").mkdir(exist_ok=True)
    (tmp_path / "cache" / ("a" * 32)).symlink_to(theirs)
    result = CliRunner().invoke(cache_command, ["--disk-cache-folder", str(tmp_path), "--clear"])
    assert result.exit_code == 0 and (theirs / ("0" * 32)).read_bytes() == b"mine"


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_hash_of_a_model_is_computed_again(damage: str, tmp_path: Path) -> None:
    model, memory = tmp_path / "model.gguf", tmp_path / "memory"
    model.write_bytes(bytes(range(256)) * 40)
    backdate(model)
    value = weights(model, memory).compute_hash()
    (remembered,) = memory.iterdir()
    DAMAGES[damage](remembered)
    found = weights(model, memory).cached_hash()
    assert found is None or (damage == "unreadable" and found == value)
    assert weights(model, memory).compute_hash() == value


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_measurement_is_measured_again(damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "cache_folder", lambda: tmp_path)
    put_measurement("threads", "key", load=0.0, decode_threads=3, loads=1)
    (path,) = tmp_path.iterdir()
    DAMAGES[damage](path)
    found = get_measurement("threads", "key")
    assert found is None or damage in ("one bit", "unreadable")
    put_measurement("threads", "key", load=0.0, decode_threads=3, loads=1)


def test_measurement_of_any_other_shape_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from localinfer.models.load.threads import cached_count

    monkeypatch.setattr(threads, "cache_folder", lambda: tmp_path)
    put_measurement("threads", "key", load=0.0, decode_threads=3, loads=1)
    (path,) = tmp_path.iterdir()
    for name, text in json_damages(path.read_bytes()).items():
        path.write_bytes(text)
        count, loads = cached_count("key", 8)
        assert count is None or 1 <= count <= 8, name
        assert loads >= 0, name


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_kernel_is_not_used(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "kernel.o"
    store(path, b"machine code" * 50)
    DAMAGES[damage](path)
    found = stored(path)
    assert found is None or (damage == "unreadable" and found == b"machine code" * 50)
    store(path, b"machine code" * 50)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_session_is_refused_and_costs_no_prompt(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "session"
    prompt = [256, *b"how are you?"]
    with LLM(fake_model(), identity=FakeIdentity()) as llm:  # type: ignore[arg-type]
        words = llm.complete(prompt, temperature=0, max_tokens=5).token_ids
        llm.save_session(path)
    DAMAGES[damage](path)
    with LLM(fake_model(), identity=FakeIdentity()) as llm:  # type: ignore[arg-type]
        try:
            llm.load_session(path)
            assert damage == "unreadable", "only root may have read it"
        except SessionFileError as error:
            assert str(path) in str(error)
        assert llm.complete(prompt, temperature=0, max_tokens=5).token_ids == words


def test_damaged_description_is_written_anew(use: Callable[..., Answers], cold: list[str], tmp_path: Path) -> None:
    for path in [*targets(tmp_path / "cache", "description"), *targets(tmp_path / "cache", "page")]:
        path.write_bytes(b"{")
    for parts in (MINE, OTHERS):
        use(parts)
    descriptions = [json.loads(path.read_bytes()) for path in targets(tmp_path / "cache", "description")]
    assert {fields["parts"]["weights"] for fields in descriptions} == {"mine", "others"}
