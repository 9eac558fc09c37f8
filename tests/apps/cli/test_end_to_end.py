"""The installed command with real models, in processes of its own where those matter: what a user sees."""

import io
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import localinfer
from localinfer.apps.cli import main
from localinfer.models import demo
from tests.support.limits import seconds
from tests.support.warm_python import WarmPython

Result = "subprocess.CompletedProcess[bytes]"
GREEDY = ("--temperature", "0", "-n", "24")
PROMPT = "Once upon a time"
STORIES = json.loads((Path(__file__).parents[2] / "golden" / "demo.json").read_text("utf-8"))
"""Greedy texts of the model that ships, by another runtime."""


def apart(name: str | bytes, *arguments: str | bytes) -> list[str | bytes]:
    """A command's words, with one more where it would leave something in the user's own cache folder."""
    keeps = name in ("run", "chat") and "--disk-cache-folder" not in arguments
    return [name, *["--no-disk-cache"] * keeps, *arguments]


def command(*arguments: str | bytes) -> list[str | bytes]:
    return [sys.executable, "-m", "localinfer", *apart(*arguments)]


def slow_command(*arguments: str) -> list[str | bytes]:
    return [sys.executable, "-c", SLOW_RUN, *apart(*arguments)]


def start(words: list[str | bytes], kind: "type[subprocess.Popen[bytes]]" = WarmPython) -> "subprocess.Popen[bytes]":
    """Start it in a copy of a process that has imported the command, or as a user does."""
    pipe = subprocess.PIPE
    return kind(words, stdin=pipe, stdout=pipe, stderr=pipe)


def run(*arguments: str | bytes, stdin: bytes = b"", kind: "type[subprocess.Popen[bytes]]" = WarmPython) -> Result:
    with start(command(*arguments), kind) as process:
        output, errors = process.communicate(stdin, timeout=seconds(50))
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


@pytest.fixture
def run_here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command in this process."""

    def run(*arguments: str, stdin: str = "") -> Result:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main(apart(*arguments))
        written, errors = capfd.readouterr()
        return subprocess.CompletedProcess(arguments, code, written.encode(), errors.encode())

    return run


def assert_one_error_line(result: Result, *words: str) -> None:
    stderr = result.stderr.decode()
    assert result.returncode == 2
    assert result.stdout == b""
    assert stderr.startswith("error: "), stderr
    assert stderr.count("\n") == 1, stderr
    for word in words:
        assert word in stderr


@pytest.fixture(scope="module")
def greedy_text() -> str:
    """What the demo model says greedily, from the command."""
    result = run("run", "-p", PROMPT, *GREEDY, kind=subprocess.Popen)
    assert result.returncode == 0, result.stderr.decode()
    assert result.stderr == b""
    return result.stdout.decode()


@pytest.fixture(scope="module")
def demo_file() -> Path:
    return Path(demo.__file__).parent / "demo-f16.gguf"


def test_run_writes_something_with_the_demo_model(greedy_text):
    assert len(greedy_text.split()) > 5


def test_run_is_the_same_text_on_one_thread_from_a_pipe_and_with_stats(greedy_text, run_here):
    result = run_here("run", "--threads", "1", "--stats", *GREEDY, stdin=f"{PROMPT}\n")
    assert result.returncode == 0
    assert result.stdout.decode() == greedy_text
    assert "tokens/s" in result.stderr.decode()


def test_run_prints_what_the_library_completes(greedy_text):
    with localinfer.load() as llm:
        completion = llm.complete(PROMPT, max_tokens=24, temperature=0)
    assert completion.text == greedy_text


def test_run_repeats_a_draw_for_the_same_seed(run_here):
    first = run("run", "-p", PROMPT, "-n", "24", "--seed", "7").stdout
    second, other = (run_here("run", "-p", PROMPT, "-n", "24", "--seed", seed).stdout for seed in ("7", "8"))
    assert first == second
    assert first != other


def test_run_stops_before_a_stop_string(greedy_text, run_here):
    word = greedy_text.split()[3]
    result = run_here("run", "-p", PROMPT, *GREEDY, "--stop", word)
    assert result.stdout.decode() == greedy_text[: greedy_text.index(word)]


def test_run_tells_the_story_that_another_runtime_tells(demo_file: Path, run_here):
    result = run_here("run", "-m", str(demo_file), "-p", PROMPT, "--temperature", "0", "-n", "80")
    assert result.returncode == 0, result.stderr.decode()
    story = result.stdout.decode()
    assert len(story) > 200 and STORIES[PROMPT].startswith(story.removesuffix("\n"))


def test_chat_from_a_pipe_answers_each_line(run_here):
    result = run_here("chat", "--lines", "--temperature", "0", "-n", "12", stdin="Hello\nTell me a story.\n")
    assert result.returncode == 0, result.stderr.decode()
    assert all(line.startswith(b"the reply was cut after 12 tokens") for line in result.stderr.splitlines())
    assert len(result.stdout.split()) > 4


def test_a_pipe_is_one_message_that_is_answered_as_the_library_chats():
    message = "Hello!\n\nWho are you?"
    result = run("chat", "-p", "Hello!", "--temperature", "0", stdin=b"Who are you?\n")
    assert result.returncode == 0, result.stderr.decode()
    with localinfer.load() as llm:
        reply = llm.chat([{"role": "user", "content": message}], temperature=0)
    assert reply.text and result.stdout.decode() == f"{reply.text}\n"
    assert result.stderr == b""


def test_tokenize_ids_decode_to_the_text(run_here):
    text = "Once upon a time, a fox said: caf\u00e9!"
    result = run_here("tokenize", "--ids", "--no-special", text)
    assert result.returncode == 0, result.stderr.decode()
    with localinfer.load() as llm:
        assert llm.tokenizer.decode([int(word) for word in result.stdout.split()]) == text


def test_show_describes_the_demo_model(demo_file, run_here):
    result = run_here("show", str(demo_file))
    assert result.returncode == 0, result.stderr.decode()
    assert b"llama" in result.stdout
    assert b"chat template" in result.stdout


@pytest.mark.parametrize("num_bytes", [0, 3, 20, 1000, -1])
def test_cut_file_is_one_line_and_exit_code_2(demo_file, tmp_path, num_bytes, run_here):
    path = tmp_path / "cut.gguf"
    path.write_bytes(demo_file.read_bytes()[:num_bytes])
    assert_one_error_line(run_here("run", "-m", str(path), "-p", PROMPT), "cut.gguf")


@pytest.mark.parametrize("name", ["run", "chat", "tokenize"])
def test_missing_file_is_one_line_and_exit_code_2(tmp_path, name, run_here):
    arguments = {"run": ["-p", PROMPT], "chat": ["-p", PROMPT], "tokenize": [PROMPT]}[name]
    result = run_here(name, "-m", str(tmp_path / "nothing.gguf"), *arguments)
    assert_one_error_line(result, "nothing.gguf", "does not exist")


def test_too_long_prompt_is_one_line_and_exit_code_2(run_here):
    assert_one_error_line(run_here("run", "--context-length", "64", "-p", "word " * 500), "64")


@pytest.mark.skipif(sys.platform == "win32", reason="arguments are text there")
def test_undecodable_argument_is_one_line_and_exit_code_2():
    assert_one_error_line(run("run", "-p", b"caf\xe9", kind=subprocess.Popen), "U+DCE9")


SLOW_RUN = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background leaves it ignored
from localinfer.generation.stream import TextStream
step = TextStream.__next__
def slow_step(stream):
    time.sleep(0.02)
    return step(stream)
TextStream.__next__ = slow_step
from localinfer.apps.cli import main
sys.exit(main(sys.argv[1:]))
"""
"""The command with a pause before every token: the demo model alone is done before anybody can interrupt it."""


@pytest.mark.skipif(sys.platform == "win32", reason="signals differ there")
def test_ctrl_c_ends_a_run_cleanly():
    arguments = slow_command("run", "-p", PROMPT, "-n", "100000", "--ignore-eos", "--context-length", "1024")
    with start(arguments) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
        process.stdout.read()
        assert process.wait(timeout=seconds(15)) == 130
    assert errors == b""


@pytest.mark.skipif(sys.platform == "win32", reason="pipes close differently there")
def test_reader_that_leaves_ends_a_run_quietly():
    arguments = slow_command("run", "-p", PROMPT, "-n", "1000", "--ignore-eos")
    with start(arguments) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        errors = process.stderr.read()
        assert process.wait(timeout=seconds(15)) == 141
    assert errors == b""


def test_restarted_run_goes_on_from_disk_with_the_same_text(greedy_text, tmp_path, run_here):
    words = ("run", "--disk-cache-folder", str(tmp_path / "kept"), "--stats", "-p", PROMPT, *GREEDY)
    first, second = run(*words), run_here(*words)
    assert first.stdout.decode() == second.stdout.decode() == greedy_text
    assert b"0 of them cached" in first.stderr
    assert b"0 of them cached" not in second.stderr
    listed = run_here("cache", "--disk-cache-folder", str(tmp_path / "kept")).stdout.decode()
    assert "demo" in listed
    assert run_here("cache", "--clear", "--disk-cache-folder", str(tmp_path / "kept")).returncode == 0
    assert not [path for path in (tmp_path / "kept").rglob("*") if path.is_file()]
