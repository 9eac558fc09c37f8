"""The configuration file: defaults of the command line, checked with their line, and never of the Python API."""

import io
import sys
from pathlib import Path

import pytest

from localinfer.apps.cli import main
from localinfer.apps.config import DEVICES, config_path, describe_config, read_config
from localinfer.errors import RequestError
from localinfer.models import demo
from localinfer.models.load import device_request

DEMO = str(Path(demo.__file__).parent / "demo-f16.gguf")

WHOLE = """
model = "~/models/a.gguf"
threads = 3
context_length = 2048
kv_type = "q8_0/f16"
device = "cpu"

[sampling]
temperature = 0
top_k = 7
typical_p = 0.5
seed = 11

[chat]
system = "Be brief."
template_kwargs = {template_date = 2026-10-01, name = "A"}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write the user's configuration file."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "a.gguf").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    path = config_path()
    assert path is not None
    path.parent.mkdir(parents=True)

    def write(text: str) -> Path:
        path.write_text(text, encoding="utf-8")
        return path

    return write


def test_a_file_gives_defaults_and_options_win(fake_llm, config, capsys, tmp_path):
    config(WHOLE)
    assert main(["chat", "-p", "Hi", "--top-k", "9", "--device", "auto"]) == 0
    loaded, options = fake_llm.load_options, fake_llm.options[0]
    assert Path(loaded["model"]) == tmp_path / "models" / "a.gguf"
    assert [loaded[name] for name in ("threads", "context_length", "kv_type")] == [3, 2048, "q8_0/f16"]
    assert loaded["device"] == "auto"
    assert [options[name] for name in ("temperature", "top_k", "typical_p", "seed")] == [0.0, 9, 0.5, 11]
    assert fake_llm.prompts[0][0] == {"role": "system", "content": "Be brief."}
    assert fake_llm.defaults["template_variables"] == {"template_date": "2026-10-01", "name": "A"}
    assert main(["chat", "-p", "Hi", "--chat-template-kwargs", '{"name": "B"}']) == 0
    assert fake_llm.defaults["template_variables"] == {"name": "B"}


def test_no_config_and_no_file_leave_the_defaults(fake_llm, config, capsys):
    path = config(WHOLE)
    assert main(["run", "-p", "Hi", "--no-config"]) == 0
    path.unlink()
    assert main(["run", "-p", "Hi"]) == 0
    first, second = fake_llm.options
    assert first == second and not {"temperature", "top_k", "typical_p"} & first.keys()
    assert fake_llm.load_options["model"] is None and fake_llm.load_options["threads"] is None


def test_commands_take_what_they_have_options_for(fake_llm, config, capsys, monkeypatch):
    """A chunk of `perplexity` and a text of `embed` are not as long as a chat's context."""
    config(WHOLE)
    seen = {}

    def load(model, **options):
        seen.update(options)
        raise RequestError("enough")

    monkeypatch.setattr("localinfer.load", load)
    for words in (["perplexity", DEMO], ["embed", DEMO, "Hi"]):
        seen.clear()
        assert main(words) == 2
        assert capsys.readouterr().err == "error: enough\n"
        assert seen["threads"] == 3 and seen["context_length"] in (None, 512)


def test_a_folder_of_models_is_not_joined_by_the_default_one(config, capsys, monkeypatch, tmp_path):
    config(WHOLE)
    seen = []

    def sources(model, models, options):
        seen.append((model, models.folder))
        raise RequestError("enough")

    monkeypatch.setattr("localinfer.apps.cli.serve.find_sources", sources)
    words = ["serve", "--no-tcp", "--socket", str(tmp_path / "s")]
    assert main([*words, "--models", "all"]) == 2
    assert main(words) == 2
    assert main([*words, "--models", "all", "-m", "mine.gguf"]) == 2
    assert seen == [(None, "all"), (str(tmp_path / "models" / "a.gguf"), None), ("mine.gguf", "all")]


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("thread = 3", 1, "'thread'"),
        ("\n[sampling]\ntemprature = 1", 3, "'temprature' in [sampling]"),
        ("[server]\nport = 1", 1, "'server'"),
        ("threads = 0", 1, "threads is 0"),
        ("threads = true", 1, "threads is True"),
        ('context_length = "big"', 1, "context_length is 'big'"),
        ('kv_type = "q9"', 1, "kv_type is 'q9'"),
        ("kv_type = 8", 1, "kv_type is 8"),
        ('device = "tpu"', 1, "wanted one of auto, cpu, cuda, or GPUs such as cuda:0,cuda:1"),
        ("device = [1]", 1, "wanted one of auto, cpu, cuda"),
        ('model = ""', 1, "model is ''"),
        ('model = "a.gguf"', 1, "give the whole path"),
        ('# model\n"model" = "./a"', 2, "give the whole path"),
        ("[chat]\nsystem = 5", 2, "system is 5"),
        ("chat = 5", 1, "write [chat]"),
        ("[sampling]\ntop_p = 2", 2, "top_p is 2"),
        ("[sampling]\ntop_k = 1.5", 2, "top_k is 1.5"),
        ("[sampling]\ntop_p = nan", 2, "top_p is nan"),
        ("[sampling]\nmirostat = 1", 2, "mirostat is 1"),
        ("[sampling]\nseed = -1", 2, "seed is -1"),
        ("[serve]\nport = 1", 2, "'port' in [serve]"),
        ('[serve]\nallow_host = "x"', 2, "wanted a list of names"),
        ("[serve]\nallow_origin = [1]", 2, "wanted a list of names"),
        ("[serve]\nrequests_per_minute = 0", 2, "requests_per_minute is 0"),
        ("[sampling]\nmin_p = 1979-05-27", 2, "min_p is datetime"),
        ("threads = 1\nthreads = = 2", 2, "is not TOML"),
    ],
)
def test_what_is_wrong_is_named_with_its_file_and_line(fake_llm, config, capsys, text, line, said):
    path = config(text)
    assert main(["run", "-p", "Hi"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {path}") and error.count("\n") == 1
    assert f"line {line}" in error and said in error and "--no-config" in error
    assert main(["run", "-p", "Hi", "--no-config"]) == 0
    assert main(["run", "--help"]) == 0


def test_a_file_that_cannot_be_read_is_named(config, capsys, tmp_path):
    path = config("")
    path.write_bytes(b'model = "caf\xe9"')
    with pytest.raises(RequestError, match="not UTF-8"):
        read_config()
    path.unlink()
    path.mkdir()
    with pytest.raises(RequestError, match=r"config\.toml cannot be read"):
        read_config()


def test_the_file_is_described_with_what_it_sets_or_what_is_wrong(config, monkeypatch):
    path = config('threads = 3\n[chat]\nsystem = "Be brief."')
    assert describe_config() == [f"configuration: {path}", "  threads = 3", "  system = 'Be brief.'"]
    config("thread = 3")
    (line,) = describe_config()
    assert line.startswith(f"configuration: {path}, line 1: there is no setting 'thread'")
    path.unlink()
    (line,) = describe_config()
    assert line.startswith(f"configuration: none; {path} may set defaults")
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", "")
    if sys.platform not in ("darwin", "win32"):
        assert describe_config() == ["configuration: none, as this user has no home folder"]
        assert read_config().defaults() == {}


def test_devices_are_those_of_the_library():
    assert DEVICES == device_request.DEVICES
