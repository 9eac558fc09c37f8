"""The command line: what it prints where, and how it ends."""

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

import localinfer
from localinfer.apps.cli import main
from localinfer.errors import ContextLengthError, RequestError
from localinfer.generation.options import Grammar, JsonObject, JsonSchema, Regex
from tests.support.limits import seconds


def run_process(*arguments: str, stdin: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    return subprocess.run(
        [sys.executable, "-m", "localinfer", *arguments],
        input=stdin,
        capture_output=True,
        timeout=seconds(50),
        check=False,
    )


def assert_one_error_line(stderr: str, *words: str) -> None:
    assert stderr.startswith("error: "), stderr
    assert stderr.count("\n") == 1, stderr
    for word in words:
        assert word in stderr


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_run_prints_the_completion_and_nothing_else(fake_llm, capsys):
    assert main(["run", "-p", "Hi"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello there"
    assert captured.err == ""
    assert fake_llm.prompts == ["Hi"]
    assert fake_llm.is_closed


def test_run_holds_the_completion_to_a_form(fake_llm, capsys, tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "integer"}', encoding="utf-8")
    grammar.write_text('start: "a"', encoding="utf-8")
    for words in (["--json"], ["--json-schema", str(schema)], ["--grammar", str(grammar)], ["--regex", ""]):
        assert main(["run", "-p", "Hi", *words]) == 0
    assert [options["constraint"] for options in fake_llm.options] == [
        JsonObject(),
        JsonSchema('{"type": "integer"}'),
        Grammar('start: "a"'),
        Regex(""),
    ]
    capsys.readouterr()
    assert main(["run", "-p", "Hi", "--json", "--regex", "a"]) == 2
    assert_one_error_line(capsys.readouterr().err, "Only one")
    assert main(["run", "-p", "Hi", "--grammar", str(tmp_path / "none")]) == 2
    assert_one_error_line(capsys.readouterr().err, "--grammar", "none")


def test_run_stats_go_to_stderr(fake_llm, capsys):
    assert main(["run", "-p", "Hi", "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello there"
    assert captured.err == (
        "prompt 3 tokens, 1 of them cached; first token after 0.250 s; completion 2 tokens at 12.5 tokens/s; seed 77\n"
    )


def test_run_defaults_are_the_documented_ones(fake_llm, capsys):
    main(["run", "-p", "Hi"])
    assert fake_llm.options[0] == {
        "max_tokens": 256,
        "stop": [],
        "ignore_eos": False,
        "context_shift": False,
        "constraint": None,
        "seed": None,
    }
    load_options = dict(fake_llm.load_options)
    assert callable(load_options.pop("progress"))
    assert load_options == {
        "model": None,
        "device": "auto",
        "gpu_layers": None,
        "tensor_split": None,
        "cpu_moe": None,
        "threads": None,
        "measure_again": False,
        "verify": True,
        "cancel": None,
        "context_length": None,
        "kv_type": "f16",
        "kv_memory": None,
        "kv_window": None,
        "disk_cache": True,
        "disk_cache_folder": None,
        "speculation": "auto",
        "draft": None,
        "mmproj": "auto",
        "chat_template": None,
        "rope": localinfer.RopeOptions(),
        "overrides": {},
    }


@pytest.mark.parametrize("command", [["run", "-p", "Hi"], ["chat"]])
def test_rare_sampling_options_are_handed_on_where_they_are_given(fake_llm, command, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    flags = "--typical-p 0.9 --top-n-sigma 1.5 --xtc-probability 0.5 --xtc-threshold 0.2 --dynatemp-range 0.3"
    flags += " --dynatemp-exponent 2 --mirostat 2 --mirostat-tau 4 --mirostat-eta 0.2 --repetition-last-n -1"
    flags += " --frequency-penalty 0.1 --presence-penalty -0.1 --dry-multiplier 0.8 --dry-base 1.5"
    flags += " --dry-allowed-length 3 --dry-last-n 100 --dry-sequence-breaker ; --dry-sequence-breaker ,"
    flags += " --logit-bias 5=1.5 --logit-bias 7=-inf"
    assert main([*command, *flags.split()]) == 0
    given = {
        "typical_p": 0.9,
        "top_n_sigma": 1.5,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.2,
        "dynatemp_range": 0.3,
        "dynatemp_exponent": 2.0,
        "mirostat": 2,
        "mirostat_tau": 4.0,
        "mirostat_eta": 0.2,
        "repetition_last_n": -1,
        "frequency_penalty": 0.1,
        "presence_penalty": -0.1,
        "dry_multiplier": 0.8,
        "dry_base": 1.5,
        "dry_allowed_length": 3,
        "dry_last_n": 100,
        "dry_sequence_breakers": [";", ","],
        "logit_bias": {5: 1.5, 7: -math.inf},
    }
    assert given.items() <= fake_llm.options[0].items()


def test_run_prints_the_best_of_a_beam_search(fake_llm, capsys):
    assert main(["run", "-p", "Hi", "-n", "5", "--beams", "3", "--ignore-eos"]) == 0
    assert capsys.readouterr().out == "the best"
    assert fake_llm.options == [{"num_beams": 3, "max_tokens": 5, "ignore_eos": True}]


@pytest.mark.parametrize("command", [["run", "-p", "Hi"], ["chat"]])
def test_disk_cache_can_be_switched_off(fake_llm, command, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    main([*command, "--no-disk-cache"])
    assert fake_llm.load_options["disk_cache"] is False


def test_run_hands_every_option_on(fake_llm, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.gguf").touch()
    flags = "-m x.gguf -n 7 --temperature 0.5 --top-k 3 --top-p 0.5 --min-p 0 --repetition-penalty 1.1 --seed 9"
    flags += " --threads 2 --context-length 64 --kv-type f32 --stop a --stop b --ignore-eos --context-shift"
    flags += " --kv-memory 1.5GiB --disk-cache-size 2GB --disk-cache-folder there"
    assert main(["run", "-p", "Hi", *flags.split()]) == 0
    assert fake_llm.options[0] == {
        "max_tokens": 7,
        "stop": ["a", "b"],
        "ignore_eos": True,
        "context_shift": True,
        "constraint": None,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.5,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
        "seed": 9,
    }
    assert fake_llm.load_options["model"] == "x.gguf"
    assert fake_llm.load_options["kv_type"] == "f32"
    assert fake_llm.load_options["context_length"] == 64
    assert fake_llm.load_options["kv_memory"] == 3 << 29
    assert fake_llm.load_options["disk_cache"] == 2 * 10**9
    assert fake_llm.load_options["disk_cache_folder"] == "there"


@pytest.mark.parametrize(("text", "size"), [("4096", 4096), ("2gb", 2 * 10**9), ("64 MiB", 64 << 20), ("0.5kB", 500)])
def test_sizes_are_bytes_with_or_without_a_unit(fake_llm, capsys, text, size):
    assert main(["run", "-p", "Hi", "--kv-memory", text]) == 0
    assert fake_llm.load_options["kv_memory"] == size


@pytest.mark.parametrize("text", ["", "many", "0", "-1GB", "nan", "inf", "1TBB", "GB"])
def test_wrong_sizes_are_one_line(fake_llm, capsys, text):
    assert main(["run", "-p", "Hi", "--kv-memory", text]) == 2
    assert_one_error_line(capsys.readouterr().err, "--kv-memory", "such as 2GB")


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("--tensor-split 3,1", {"tensor_split": [3, 1]}),
        ("--tensor-split 0.5/0.5 --device cuda:0,cuda:1", {"tensor_split": [0.5, 0.5], "device": "cuda:0,cuda:1"}),
        ("--cpu-moe", {"cpu_moe": True}),
        ("--n-cpu-moe 3", {"cpu_moe": 3}),
        ("--n-cpu-moe 0", {"cpu_moe": 0}),
        ("", {"cpu_moe": None, "tensor_split": None}),
    ],
)
def test_shares_of_gpus_and_experts_on_the_cpu_are_said_as_in_llama_cpp(fake_llm, words, wanted):
    assert main(["run", "-p", "Hi", *words.split()]) == 0
    found = {name: fake_llm.load_options[name] for name in wanted}
    # True is all layers, and 1 the first.
    assert found == wanted and {name: type(value) for name, value in found.items()} == {
        name: type(value) if name == "cpu_moe" else type(found[name]) for name, value in wanted.items()
    }


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--tensor-split x", "'x' are no shares"),
        ("--tensor-split 0,0", "are no shares"),
        ("--tensor-split 1,nan", "are no shares"),
        ("--tensor-split 1,-1", "are no shares"),
        ("--n-cpu-moe -1", "--n-cpu-moe"),
        ("--cpu-moe --n-cpu-moe 3", "leave one out"),
        ("--device cuda:a", "or GPUs by number"),
    ],
)
def test_wrong_shares_of_gpus_are_refused(fake_llm, capsys, words, said):
    assert main(["run", "-p", "Hi", *words.split()]) == 2
    assert_one_error_line(capsys.readouterr().err, said)


@pytest.mark.parametrize(("text", "layers"), [("auto", None), ("0", 0), ("99", 99)])
def test_layers_on_the_gpu_are_a_number_or_what_fits(fake_llm, capsys, text, layers):
    assert main(["run", "-p", "Hi", "--gpu-layers", text]) == 0
    assert fake_llm.load_options["gpu_layers"] == layers
    for wrong in ("all", "-1", "1.5", ""):
        assert main(["run", "-p", "Hi", "--gpu-layers", wrong]) == 2
        assert_one_error_line(capsys.readouterr().err, "--gpu-layers", "give one, or 'auto'")


@pytest.mark.parametrize("arguments", [["run"], ["run", "-p", "-"]])
def test_run_reads_the_prompt_from_a_pipe(fake_llm, capsys, monkeypatch, arguments):
    monkeypatch.setattr(sys, "stdin", io.StringIO("two\nlines\n"))
    assert main(arguments) == 0
    assert fake_llm.prompts == ["two\nlines"]


def test_run_without_a_prompt_on_a_terminal_says_how_to_give_one(fake_llm, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["run"]) == 2
    assert_one_error_line(capsys.readouterr().err, "-p")


def test_run_neutralises_controls_on_a_terminal_and_ends_the_line(fake_llm, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    fake_llm.pieces = ["a\x1b", "[2Jb"]
    assert main(["run", "-p", "Hi"]) == 0
    assert terminal.getvalue() == "a\u241b[2Jb\n"


def test_run_leaves_piped_text_untouched(fake_llm, capsys):
    fake_llm.pieces = ["a\x1b[2Jb\r"]
    main(["run", "-p", "Hi"])
    assert capsys.readouterr().out == "a\x1b[2Jb\r"


def test_run_interrupted_exits_130_and_keeps_what_was_printed(fake_llm, capsys):
    fake_llm.pieces = ["Hello", KeyboardInterrupt()]
    assert main(["run", "-p", "Hi"]) == 130
    captured = capsys.readouterr()
    assert captured.out == "Hello"
    assert captured.err == ""
    assert fake_llm.is_closed


@pytest.mark.parametrize(
    ("command", "said", "shown"),
    [
        (
            "run",
            "load with a larger context_length, or allow context_shift",
            "a larger --context-length, or allow --context-shift",
        ),
        ("run", "dry_sequence_breakers has '', num_beams is 0", "--dry-sequence-breaker has '', --beams is 0"),
        ("tokenize", "context_length is too small", "context_length is too small"),
        (
            "run",
            "llama.context_length is 0; wanted 'max_tokens' in a/kv_memory",
            "llama.context_length is 0; wanted 'max_tokens' in a/kv_memory",
        ),
    ],
)
def test_errors_name_the_options_of_the_command(fake_llm, capsys, monkeypatch, command, said, shown):
    def refuse(*_: object, **__: object) -> None:
        raise RequestError(said)

    monkeypatch.setattr(fake_llm, "stream", refuse)
    monkeypatch.setattr(fake_llm.tokenizer, "encode", refuse)
    assert main([command, *["-p"] * (command == "run"), "Hi"]) == 2
    assert shown in capsys.readouterr().err


@pytest.mark.parametrize("way", ["warnings", "logging"])
def test_warnings_name_the_options_of_the_command(way):
    program = (
        "import logging, sys, warnings; import localinfer; from localinfer.apps.cli import main\n"
        "def load(*_, **__):\n"
        "    (warnings.warn if sys.argv[1] == 'warnings' else logging.getLogger('x').warning)('no\\nkv_memory')\n"
        "    raise localinfer.errors.RequestError('kv_window')\n"
        "localinfer.load = load; sys.exit(main(['run', '-p', 'x']))"
    )
    result = subprocess.run([sys.executable, "-c", program, way], capture_output=True, timeout=seconds(15), check=False)
    assert result.stderr.decode() == "warning: no --kv-memory\nerror: --kv-window\n"
    assert result.returncode == 2


def test_library_error_is_one_line_and_exit_code_2(fake_llm, capsys):
    fake_llm.pieces = [ContextLengthError("too\nlong\x1b[2J")]
    assert main(["run", "-p", "Hi"]) == 2
    assert capsys.readouterr().err == "error: too long\u241b[2J\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "-p", "x", "--bogus"], ["--bogus", "localinfer run --help"]),
        (["run", "-p", "x", "-n", "0"], ["-n"]),
        (["run", "-p", "x", "-n", "many"], ["many"]),
        (["run", "-p", "x", "--temperature", "-1"], ["--temperature"]),
        (["run", "-p", "x", "--beams", "3", "--stop", "a"], ["--beams", "--stop"]),
        (["run", "-p", "x", "--logit-bias", "5"], ["--logit-bias", "ID=NUMBER"]),
        (["run", "-p", "x", "--kv-type", "q1"], ["q1", "q8_0/q4_0"]),
        (["run", "-p", "bad \udcff byte"], ["U+DCFF", "character 4"]),
        (["run", "-p", "x", "--stop", "\udcff"], ["--stop"]),
        (["nonsense"], ["nonsense"]),
        (["show"], ["MODEL"]),
        (["show", "no-such-file.gguf"], ["no-such-file.gguf"]),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(fake_llm, capsys, arguments, words):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert_one_error_line(captured.err, *words)


def test_undecodable_pipe_is_one_line_and_exit_code_2():
    result = run_process("tokenize", stdin=b"caf\xe9")
    assert result.returncode == 2
    assert_one_error_line(result.stderr.decode(), "U+DCE9", "UTF-8")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes close differently there")
def test_reader_that_leaves_ends_the_command_quietly(tmp_path):
    errors = tmp_path / "errors"
    reader, writer = os.pipe()
    os.close(reader)
    with errors.open("wb") as stderr:
        process = subprocess.run(
            [sys.executable, "-m", "localinfer", "--help"],
            stdout=writer,
            stderr=stderr,
            timeout=seconds(15),
            check=False,
        )
    os.close(writer)
    assert process.returncode == 141
    assert errors.read_bytes() == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_is_one_line_and_exit_code_2():
    with open("/dev/full", "wb") as full:
        process = subprocess.run(
            [sys.executable, "-m", "localinfer", "--help"],
            stdout=full,
            stderr=subprocess.PIPE,
            timeout=seconds(15),
            check=False,
        )
    assert process.returncode == 2
    assert_one_error_line(process.stderr.decode(), "No space left")


@pytest.mark.parametrize("arguments", [["--help"], ["-h"]])
def test_help_lists_every_command(capsys, arguments):
    assert main(arguments) == 0
    help_text = capsys.readouterr().out
    for command in ("run", "chat", "show", "tokenize", "embed", "rerank"):
        assert f"\n  {command} " in help_text


def test_help_imports_nothing_heavy():
    program = (
        "import sys; from localinfer.apps.cli import main; main(['--help'])\n"
        "heavy = {'numpy', 'numba', 'llvmlite', 'gguf', 'tokenizers', 'jinja2', 'prompt_toolkit', 'rich', 'asyncio'}\n"
        "sys.exit(str(sorted(heavy & set(sys.modules))) if heavy & set(sys.modules) else 0)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=seconds(15), check=False)
    assert result.returncode == 0, result.stderr.decode()


def test_version_is_the_installed_one(capsys):
    from importlib.metadata import version

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"localinfer {version('localinfer')}\n"


def test_tokenize_prints_one_token_a_line(fake_llm, capsys):
    assert main(["tokenize", "hi\n"]) == 0
    assert capsys.readouterr().out == "1\t'\\x01'\n104\t'h'\n105\t'i'\n10\t'\\n'\n"


def test_tokenize_ids_prints_one_line_of_ids(fake_llm, capsys):
    assert main(["tokenize", "--ids", "--no-special", "hi"]) == 0
    assert capsys.readouterr().out == "104 105\n"


def test_chat_from_a_pipe_prints_only_replies(fake_llm, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert main(["chat", "--lines", "--system", "Be brief.", "--seed", "5"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "Hello there\nHello there\n"
    assert captured.err == ""
    assert fake_llm.prompts[1] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "Hello there"},
        {"role": "user", "content": "two"},
    ]
    assert fake_llm.options[0]["seed"] == 5
    assert fake_llm.options[0]["max_tokens"] is None
    assert fake_llm.options[0]["pin_cache"] is True and fake_llm.options[0]["context_shift"] is False


def test_chat_error_in_a_pipe_is_exit_code_2(fake_llm, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    fake_llm.pieces = [ContextLengthError("too long")]
    assert main(["chat", "--lines"]) == 2
    assert capsys.readouterr().err == "error: too long\n"


def test_show_refuses_a_file_that_is_not_gguf(tmp_path: Path, capsys):
    path = tmp_path / "notes.gguf"
    path.write_text("not a model at all, but long enough to look at")
    assert main(["show", str(path)]) == 2
    assert_one_error_line(capsys.readouterr().err, "notes.gguf", "GGUF")


def test_show_json_is_one_object_with_tensors_when_asked(shared: Path, capsys):
    path = str(shared / "models" / "stories260K.gguf")
    assert main(["show", path, "--json"]) == 0
    description = json.loads(capsys.readouterr().out)
    assert description["architecture"] == "llama"
    assert description["num_parameters"] == 260032
    assert description["sizes"]["vocab_size"] == 512
    assert "tensors" not in description
    assert main(["show", path, "--json", "--tensors"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tensors"]) == 47
