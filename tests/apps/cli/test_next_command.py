"""What a newcomer meets: each error names the command to type next, and `localinfer` alone the first ones."""

import io
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from localinfer.apps.cli import main, models
from localinfer.errors import ModelFileError, RequestError
from tests.support.limits import seconds


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("words", "command"),
    [
        ("chta", "localinfer chat"),
        ("Serve", "localinfer serve"),
        ("generate", "localinfer run"),
        ("genrate", "localinfer run"),
        ("version", "localinfer --version"),
        ("help", "localinfer --help"),
        ("help chat", "localinfer chat --help"),
        ("frobnicate", "localinfer --help"),
        ("model.gguf", "localinfer chat -m model.gguf"),
        ("org/repo:Q4_K_M", "localinfer chat -m org/repo:Q4_K_M"),
        ("Why+is+the+sky+blue?", "localinfer chat -p 'Why is the sky blue?'"),
        ("-m model.gguf", "localinfer chat -m ..."),
        ("--no-such", "localinfer --help"),
        ("chat Hello+there", "localinfer chat -p 'Hello there'"),
        ("chat model.gguf", "localinfer chat -m model.gguf"),
        ("run org/repo", "localinfer run -m org/repo"),
        ("serve model.gguf", "localinfer serve -m model.gguf"),
        ("serve .", "localinfer serve --models ."),
        ("run --system Brief", "localinfer chat --system ..."),
        ("run --no-such", "localinfer run --help"),
        ("run -p", "localinfer run --help"),
        ("show", "localinfer show [OPTIONS] MODEL"),
        ("show . b", "localinfer show --help"),
        ("quantize .", "localinfer quantize [OPTIONS] SOURCE TARGET"),
        ("bench", "localinfer bench [OPTIONS] MODEL"),
        ("completion tcsh", "localinfer completion --help"),
    ],
)
def test_a_command_line_that_cannot_be_read_is_answered_with_one_to_type(words, command, capsys):
    assert main([word.replace("+", " ") for word in words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1
    assert f"`{command}`" in error


def test_close_options_are_suggested(capsys):
    assert main(["run", "--temprature", "1"]) == 2
    assert "--temperature" in capsys.readouterr().err


def test_no_prompt_is_answered_with_a_command(fake_llm, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["run"]) == 2
    assert "`localinfer run -p TEXT`" in capsys.readouterr().err


def test_a_folder_without_weights_and_a_missing_file_are_answered_with_a_command(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    for model in (tmp_path, tmp_path / "none.gguf", tmp_path / "config.toml"):
        (tmp_path / "config.toml").write_text("threads = 1")
        assert main(["chat", "-p", "Hi", "--no-config", "-m", str(model)]) == 2
        error = capsys.readouterr().err
        assert model.name in error and error.count("\n") == 1
        assert "`localinfer " in error or "GGUF" in error


def test_a_model_that_the_configuration_names_is_said_to_be_from_there(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    (tmp_path / "localinfer").mkdir()
    file = tmp_path / "localinfer" / "config.toml"
    file.write_text('model = "/no/such/file.gguf"')
    assert main(["chat", "-p", "Hi"]) == 2
    assert f"the model is set in {file}" in capsys.readouterr().err
    assert main(["chat", "-p", "Hi", "-m", "/another/one.gguf"]) == 2
    assert str(file) not in capsys.readouterr().err
    assert main([]) == 0
    assert "/no/such/file.gguf, as configured, but it does not exist" in capsys.readouterr().out


def test_a_port_that_is_taken_is_answered_with_a_command(capsys, tmp_path):
    tmp_path.chmod(0o700)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--port", str(port), "--socket", str(tmp_path / "s"), "--no-disk-cache"]) == 2
    error = capsys.readouterr().err
    assert f"port {port}" in error and "`localinfer serve --port 0`" in error


def test_hints_of_the_library_stay_as_they_are(fake_llm, capsys, monkeypatch):
    for error in (ModelFileError("gone; type `localinfer pull it`"), RequestError("too much")):
        fake_llm.pieces = [error]
        assert main(["run", "-p", "Hi"]) == 2
        assert capsys.readouterr().err == f"error: {error}\n"


@pytest.mark.parametrize(("words", "is_told"), [([], True), (["--raw"], False)])
def test_run_says_on_a_terminal_how_to_ask_an_instruct_model(fake_llm, capsys, monkeypatch, tmp_path, words, is_told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model.gguf").touch()
    fake_llm.has_chat_template = True
    assert main(["run", "-p", "Hi"]) == 0
    assert capsys.readouterr() == ("Hello there", "")
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    assert main(["run", "-p", "Hi", "-m", "my model.gguf", *words]) == 0
    assert ("`localinfer chat -m 'my model.gguf' -p TEXT`" in screen.getvalue()) == is_told
    assert screen.getvalue().count("\n") == int(is_told)
    fake_llm.has_chat_template = False
    screen.truncate(0)
    assert main(["run", "-p", "Hi"]) == 0
    assert "chat" not in screen.getvalue()


@pytest.mark.parametrize("names", [[], ["org/repo:Q4_K_M", "x\x1b[2J"]])
def test_localinfer_alone_says_ten_lines_that_fit(names, capsys, monkeypatch):
    monkeypatch.setattr(models, "known_models", lambda: names)
    monkeypatch.setenv("COLUMNS", "72")
    assert main([]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert len(lines) == 10 and max(map(len, lines)) <= 72
    assert "\x1b" not in text
    assert sum(line.startswith("  localinfer ") for line in lines) == 3
    assert ("2 here: org/repo:Q4_K_M" in text) == bool(names)
    assert ("localinfer chat -m org/repo:Q4_K_M" in text) == bool(names)


def test_localinfer_alone_tells_of_a_broken_configuration_and_goes_on(capsys, monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "400")
    (tmp_path / "localinfer").mkdir()
    (tmp_path / "localinfer" / "config.toml").write_text("thread = 1")
    assert main([]) == 0
    assert "line 1: there is no setting 'thread'" in capsys.readouterr().out


def test_localinfer_alone_imports_nothing_heavy():
    program = (
        "import sys; from localinfer.apps.cli import main; main([])\n"
        "heavy = {'numpy', 'numba', 'llvmlite', 'gguf', 'tokenizers', 'jinja2', 'prompt_toolkit', 'huggingface_hub'}\n"
        "sys.exit(str(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=seconds(15), check=False)
    assert result.returncode == 0, result.stderr.decode()
