"""Without all packages but the core, a model is loaded, completes and chats; every other part says what to install."""

import subprocess
import sys
from pathlib import Path

import pytest

from localinfer.system.extras import EXTRAS
from tests.kernels.subprocesses import environment, run
from tests.support.limits import seconds

WITHOUT = f"""
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in { ({module for modules in EXTRAS.values() for module in modules})!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""
LOAD = """
import localinfer
with localinfer.load(threads=1) as llm:
"""


def test_the_core_loads_completes_chats_and_compiles_ahead() -> None:
    code = f"""{WITHOUT}{LOAD}
    print(len(llm.complete("Once", max_tokens=2).text))
    with llm.stream_chat([{{"role": "user", "content": "Hi"}}], max_tokens=2) as stream:
        print(all(event is not None for event in stream))
    session = llm.session("Be kind.", max_tokens=2)
    print(len(session.fork().ask("Hi").text) > 0)
    print(llm.embed("Hi").ndim)
print(localinfer.warm_up(device="cpu").num_compiled)
"""
    output, errors = run(code)
    shown = output.split()
    assert int(shown[0]) > 0 and shown[1:] == ["True", "True", "1", "0"] and errors == ""


def test_the_core_compiles_what_looks_up_rows(tmp_path: Path) -> None:
    """It once had the tables of IQ2 and IQ3 for every model, which the core lacks: a first start failed."""
    code = f"""{WITHOUT}
from localinfer.kernels.jit.object_cache import Kernel
assert Kernel("embedding.embed_f16").address
"""
    run(code, LOCALINFER_CACHE=str(tmp_path))
    assert [path.stem for path in tmp_path.rglob("*.o")] == ["embedding.embed_f16"]


MISSING = [
    ("constraints", "llm.complete('x', constraint=localinfer.Regex('a'))"),
    ("constraints", "llm.chat([{'role': 'user', 'content': 'x'}], constraint=localinfer.JsonObject())"),
    ("tools", "llm.session().ask('x', type=int)"),
    ("tools", "llm.session(tools=[localinfer.load])"),
    ("server", "import localinfer.apps.server.app"),
    ("hub", "from localinfer.storage.hub import pull, places; pull.pull_model(None, places.Places.of_user())"),
    ("gguf", "from localinfer.kernels.layouts import grid_vectors; grid_vectors('IQ2_XXS')"),
    ("convert", "from localinfer.quant.methods.workers import Workers; Workers(1)"),
]


def test_every_other_part_says_what_to_install() -> None:
    told = missing(WITHOUT, LOAD, [statement for _, statement in MISSING])
    # The chat is a part of the command, which is there once it is asked for.
    without = WITHOUT.replace("'click', ", "").replace("'click'", "")
    told += missing(without, "import localinfer\nif True:\n", ["import localinfer.apps.terminal.loop"])
    for (extra, statement), line in zip([*MISSING, ("chat", "")], told, strict=True):
        assert line.startswith(f"{extra} ") and line.endswith(f"type `pip install 'localinfer[{extra}]'`"), statement


def missing(without: str, load: str, statements: list[str]) -> list[str]:
    """The extra and the message of each statement's error."""
    code = f"""{without}{load}
    for statement in {statements!r}:
        try:
            exec(statement)
            print("nothing is missing")
        except localinfer.errors.MissingPackageError as error:
            print(error.extra, error)
"""
    return run(code)[0].splitlines()


@pytest.mark.parametrize("words", [[], ["run", "-p", "Hi"]], ids=" ".join)
def test_the_command_without_its_packages_is_one_line(words: list[str]) -> None:
    code = f"{WITHOUT}from localinfer.__main__ import main\nsys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=seconds(20),
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr == "error: the command needs click, which is not installed; type `pip install 'localinfer[cli]'`\n"
    )
