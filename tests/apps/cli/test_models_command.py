"""`localinfer pull`, `list` and `rm` on the command line, and models by name in the other commands."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from localinfer.apps.cli import EXIT_BAD_INPUT, EXIT_INTERRUPTED, main
from localinfer.models import demo
from tests.storage.hub.stand_in import StandInHub
from tests.support.limits import seconds, wait_until
from tests.support.warm_python import WarmPython

DEMO = Path(demo.__file__).parent / "demo-q4_k_m.gguf"
NAME = "org/Demo-GGUF:Q4_K_M"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StandInHub]:
    """A hub, and a home folder without models; the caches of kernels stay where they are."""
    with StandInHub({"org/Demo-GGUF": {"demo-Q4_K_M.gguf": DEMO.read_bytes()}}) as hub:
        variables = {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_TOKEN": "",
            "OLLAMA_MODELS": str(tmp_path / "ollama"),
            "XDG_DATA_HOME": str(tmp_path / "data"),
        }
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        yield hub


def test_a_model_is_pulled_listed_used_and_removed(hub, capsys):
    assert main(["pull", "org/Demo-GGUF"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{NAME}\n", "scripts read the name"
    assert "1 file, 3.8 MB" in captured.err and "free in" in captured.err
    assert main(["list"]) == 0
    [header, line] = capsys.readouterr().out.splitlines()
    assert header.split() == ["NAME", "QUANT", "SIZE", "LAST", "USED"]
    assert line.split() == [NAME, "Q4_K_M", "3.8", "MB"]
    assert main(["run", "-m", "demo", "-p", "Once", "-n", "2", "--threads", "1", "--no-disk-cache"]) == 0
    assert capsys.readouterr().out.strip()
    assert main(["tokenize", "-m", NAME, "Once"]) == 0
    assert main(["show", "org/demo-gguf"]) == 0
    assert "llama" in capsys.readouterr().out
    assert main(["list", "--all", "--json"]) == 0
    [record] = json.loads(capsys.readouterr().out)
    assert record["name"] == NAME and record["source"] == "localinfer" and not record["problem"]
    assert Path(record["path"]).samefile(record["path"]) and record["num_bytes"] == DEMO.stat().st_size
    assert main(["rm", NAME]) == 0
    assert capsys.readouterr().out == f"removed {NAME}: 3.8 MB freed\n"
    assert main(["list"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "" and "`localinfer pull org/repo` brings one" in captured.err
    assert main(["run", "-m", NAME, "-p", "Once"]) == EXIT_BAD_INPUT
    assert f"`localinfer pull {NAME}` brings it" in capsys.readouterr().err


def write_ollama_model(folder: Path) -> Path:
    """The demo model as `tiny:1b` in Ollama's store, whose files have checksums for names; the path of its file."""
    content = DEMO.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    blobs, manifests = folder / "ollama/blobs", folder / "ollama/manifests/registry.ollama.ai/library/tiny"
    for made in (blobs, manifests):
        made.mkdir(parents=True)
    (blobs / f"sha256-{digest}").write_bytes(content)
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": f"sha256:{digest}", "size": len(content)}
    (manifests / "1b").write_text(json.dumps({"layers": [layer]}))
    return blobs / f"sha256-{digest}"


def test_a_model_of_ollama_runs_from_where_it_lies(hub, tmp_path, capsys):
    blob = write_ollama_model(tmp_path)
    assert main(["list"]) == 0
    assert "list --all" in capsys.readouterr().err
    assert main(["list", "--all"]) == 0
    assert f"tiny:1b         3.8 MB             ollama  {blob}" in capsys.readouterr().out
    assert main(["run", "-m", "tiny:1b", "-p", "Once", "-n", "2", "--threads", "1", "--no-disk-cache"]) == 0
    assert main(["rm", "tiny:1b"]) == EXIT_BAD_INPUT
    assert "use `ollama rm`" in capsys.readouterr().err


def test_served_models_keep_the_name_they_were_asked_for(hub, tmp_path):
    from localinfer.apps.cli.serve import ModelsOptions, find_sources

    blob = write_ollama_model(tmp_path)
    [source], _ = find_sources("tiny:1b", ModelsOptions(), {})
    assert source.id == "tiny:1b" and source.path == blob


def test_pulled_models_are_served_under_their_names(hub, tmp_path):
    from localinfer.apps.cli.models_config import read_load_options
    from localinfer.apps.cli.serve import ModelsOptions, find_sources, load_source
    from localinfer.apps.server.router.models import LoadThreads

    assert main(["pull", "org/Demo-GGUF"]) == 0
    options = read_load_options(["--no-disk-cache", "--threads=1"])
    [source], preload = find_sources(None, ModelsOptions(pulled=True), options)
    assert (source.id, source.aliases, preload) == (NAME, ("org/Demo-GGUF",), [])
    [record] = (tmp_path / "data").rglob("*.json")
    os.utime(record, (1, 1))
    with load_source(source, options, LoadThreads()) as llm:
        assert llm.info.path.samefile(source.path)
    assert record.stat().st_mtime > 1


@pytest.mark.skipif(sys.platform == "win32", reason="Ctrl-C is sent as a signal of POSIX")
def test_ctrl_c_keeps_what_arrived_and_says_so(hub, tmp_path):
    hub.stall_after = 1_000_000
    command = [sys.executable, "-m", "localinfer", "pull", "org/Demo-GGUF"]
    with WarmPython(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        blobs = tmp_path / "hub/models--org--Demo-GGUF/blobs"
        assert wait_until(lambda: any(one.stat().st_size == 1_000_000 for one in blobs.glob("*.incomplete")), 30)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=seconds(30))
    hub.stalled.set()
    assert process.returncode == EXIT_INTERRUPTED and output == ""
    assert "stopped; what has arrived is kept: `localinfer pull org/Demo-GGUF` continues from there" in errors
    hub.stall_after = None
    assert main(["pull", "org/Demo-GGUF"]) == 0
    assert hub.downloads[1][1].startswith("bytes=1000000-")


def test_an_unfinished_pull_is_named_apart_from_models(hub, capsys):
    hub.repositories["org/Demo-GGUF"] = {f"m-Q4_K_M-0000{part}-of-00002.gguf": bytes(part) * 1000 for part in (1, 2)}
    hub.wrong.add("m-Q4_K_M-00002-of-00002.gguf")
    assert main(["pull", NAME]) == EXIT_BAD_INPUT
    assert "error: m-Q4_K_M-00002-of-00002.gguf of org/Demo-GGUF arrived damaged" in capsys.readouterr().err
    assert main(["list", "--all"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert f"unfinished: {NAME}: 1.0 kB of 3.0 kB are here; `localinfer pull {NAME}`" in captured.err


def test_a_pull_of_which_nothing_is_kept_leaves_nothing(hub, tmp_path, capsys):
    hub.wrong.add("demo-Q4_K_M.gguf")
    assert main(["pull", NAME]) == EXIT_BAD_INPUT
    assert "error: demo-Q4_K_M.gguf of org/Demo-GGUF arrived damaged" in capsys.readouterr().err
    assert main(["list", "--all"]) == 0
    assert "no models here yet" in capsys.readouterr().err
    assert not (tmp_path / "hub/models--org--Demo-GGUF").exists()


def test_names_from_the_hub_move_no_cursor(hub, capsys):
    hub.repositories["org/Demo-GGUF"] = {
        "a\x1b[2J-F32.gguf": b"x" * 300,
        "b\u202e-F16.gguf": b"y" * 300,
        "c-BF16.gguf": b"z",
    }
    assert main(["pull", "org/Demo-GGUF"]) == EXIT_BAD_INPUT
    errors = capsys.readouterr().err
    assert "\x1b" not in errors and "\u202e" not in errors
