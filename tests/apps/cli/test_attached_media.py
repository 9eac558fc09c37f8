"""Pictures and sounds with a message of the terminal's chat: by command, dragged in, from the clipboard, by -p."""

import base64
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from chat_session import Session

from localinfer.apps.cli import main
from localinfer.apps.terminal.attachments import dropped_path
from localinfer.errors import RequestError
from tests.support.seeing_model import picture_file, seeing_demo

pytest.importorskip("PIL", reason="Pillow is an optional package")
DATA = base64.b64encode(picture_file()).decode()


@pytest.fixture
def session(fake_llm: Any) -> Session:
    fake_llm.capabilities = ("chat", "vision")
    fake_llm.count_chat_tokens = lambda messages, **_: 30 * len(messages[-1]["content"])
    return Session(fake_llm)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "my photo.png"
    path.write_bytes(picture_file())
    return path


def part(name: str = "my photo.png") -> dict[str, str]:
    return {"type": "image", "name": name, "data": DATA}


def test_a_picture_goes_with_the_next_message_only(session: Session, fake_llm: Any, photo: Path) -> None:
    assert "my photo.png takes 30 tokens" in session.type(f"/image {photo}")
    session.type("What is it?", "And?")
    assert fake_llm.prompts[0][-1]["content"] == [part(), {"type": "text", "text": "What is it?"}]
    assert fake_llm.prompts[1][-1]["content"] == "And?"
    assert "[image my photo.png]" in session.type("/undo", "/undo")


@pytest.mark.parametrize("form", ["{}", "'{}'", '"{}"', "file://{url}", "{escaped}"])
def test_a_dragged_file_is_attached_and_not_sent(session: Session, fake_llm: Any, photo: Path, form: str) -> None:
    line = form.format(photo, url=str(photo).replace(" ", "%20"), escaped=str(photo).replace(" ", "\\ "))
    assert dropped_path(line) == photo
    assert "takes 30 tokens" in session.type(line)
    assert not fake_llm.prompts
    session.type("/clear", "Hi")
    assert fake_llm.prompts[0][-1]["content"] == "Hi", "/clear drops it"


def test_other_lines_are_messages(session: Session, fake_llm: Any, photo: Path) -> None:
    (photo.parent / "notes.txt").write_text("x")
    lines = [f"look at {photo}", "no such file.png", f"//{photo}", "a.png\nb.png"]
    session.type(*lines)
    assert [prompt[-1]["content"] for prompt in fake_llm.prompts] == [lines[0], lines[1], f"/{photo}", lines[3]]
    fake_llm.capabilities = ("chat",)
    assert "does not read a picture" in session.type(f"/image {photo}")


def test_an_edited_message_keeps_its_picture(session: Session, fake_llm: Any, photo: Path) -> None:
    session.type(f"/image {photo}", "What is it?")
    session.edited = "What colour is it?"
    session.type("/edit")
    assert fake_llm.prompts[-1][-1]["content"] == [part(), {"type": "text", "text": "What colour is it?"}]


def test_the_clipboards_picture_is_taken(
    session: Session, fake_llm: Any, photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image, ImageGrab

    for found in (Image.open(photo), [str(photo)]):
        monkeypatch.setattr(ImageGrab, "grabclipboard", lambda found=found: found)
        assert "takes 30 tokens" in session.type("/image")
        session.type("What is it?")
        assert fake_llm.prompts[-1][-1]["content"][0]["type"] == "image"

    def fail() -> None:
        raise NotImplementedError("wl-paste or xclip is required")

    for grab, words in ((lambda: None, "no picture"), (fail, "xclip is required")):
        monkeypatch.setattr(ImageGrab, "grabclipboard", grab)
        assert words in session.type("/image")


def test_what_is_no_picture_is_said_and_not_attached(session: Session, fake_llm: Any, photo: Path) -> None:
    assert "cannot be read" in session.type("/image none.png")
    assert "give the path of a sound file" in session.type("/audio")
    assert "does not read a sound file" in session.type(f"/audio {photo}")

    def refuse(messages: Any, **_: Any) -> int:
        raise RequestError("of an unknown format")

    fake_llm.count_chat_tokens = refuse
    assert "of an unknown format" in session.type(f"/image {photo}")
    fake_llm.count_chat_tokens = lambda messages, **_: 5000
    assert re.search(r"takes 5,000 tokens, and the context has room for", session.type(f"/image {photo}"))
    assert session.chat.attachments.message("x") == "x"


def test_one_message_with_a_picture_is_answered(
    tmp_path: Path, photo: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    model = str(seeing_demo(tmp_path))
    given = ["chat", "-m", model, "-p", "What is it?", "--no-history", "-n", "3", "--temperature", "0"]
    assert main([*given, "--image", str(photo), "--stats"]) == 3
    captured = capfd.readouterr()
    assert captured.out.strip() and "prompt 22 tokens" in captured.err
    assert main([*given, "--image", str(tmp_path / "none.png")]) == 2
    assert "none.png cannot be read" in capfd.readouterr().err
    assert main([*given, "--audio", str(photo)]) == 2
    assert "is a sound, and this model reads text and pictures" in capfd.readouterr().err
