"""PyInstaller finds the hooks by itself, and they name what no import shows: kernels, the default model, versions."""

import re
import runpy
import tomllib
from pathlib import Path
from typing import Any

import pytest

from localinfer import _MODULE_OF
from localinfer.pyinstaller_hooks import hook_folders
from localinfer.system.extras import EXTRAS

pytest.importorskip("PyInstaller", reason="the hooks run in PyInstaller, which is not installed")

(FOLDER,) = map(Path, hook_folders())


def hook(name: str) -> dict[str, Any]:
    return runpy.run_path(str(FOLDER / f"hook-{name}.py"))


def test_they_are_found_by_the_entry_point_of_the_distribution() -> None:
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    found = settings["project"]["entry-points"]["pyinstaller40"]
    assert found == {"hook-dirs": f"{hook_folders.__module__}:{hook_folders.__name__}"}
    assert {path.name for path in FOLDER.glob("hook-*.py")} == {
        *("hook-localinfer.py", "hook-localinfer.apps.cli.py", "hook-localinfer.apps.evaluate.py"),
        *("hook-localinfer.apps.server.py", "hook-llguidance.py"),
    }


def test_running_models_needs_kernels_the_default_model_and_versions() -> None:
    found = hook("localinfer")
    kernels = {
        f"localinfer.kernels.cpu.compiled.{path.parent.name}.{path.stem}"
        for path in (Path(__file__).parents[2] / "kernels" / "cpu" / "compiled").glob("*/*.py")
        if path.stem != "__init__"
    }
    wanted = kernels | set(_MODULE_OF.values())
    wanted |= {"localinfer.kernels.built_sources", "localinfer.kernels.jit.compile_ahead", "localinfer.system.freezing"}
    assert wanted <= set(found["hiddenimports"])
    files = {Path(source).name: target for source, target in found["datas"]}
    assert files["demo-f16.gguf"] == "localinfer/models/demo" and "demo-q4_k_m.gguf" not in files
    assert {re.split("[-.]", target)[0] for target in files.values()} >= {"numba", "llvmlite", "localinfer"}


def test_what_is_not_for_the_library_alone_is_left_out() -> None:
    """An application that only runs models must not carry the server, the command or the frameworks of GPUs."""
    found = hook("localinfer")
    others = (
        "localinfer.apps.server",
        "localinfer.apps.cli",
        "localinfer.storage.hub",
        "localinfer.kernels.cuda.compiled",
    )
    assert not [name for name in found["hiddenimports"] if name.startswith(others)]
    assert {"torch", "numba_cuda"} <= set(found["excludedimports"])
    assert not {module for modules in EXTRAS.values() for module in modules} & set(found["excludedimports"])


def test_the_server_has_its_page_the_command_its_modules_and_measuring_its_texts() -> None:
    names = {Path(source).name for source, _ in hook("localinfer.apps.server")["datas"]}
    assert names >= {path.name for path in (FOLDER.parent / "apps" / "webui").glob("*.[chj]*")} != set()
    assert {"localinfer.apps.cli.serve", "localinfer.apps.terminal.loop"} <= set(
        hook("localinfer.apps.cli")["hiddenimports"]
    )
    texts = list((FOLDER.parent / "apps" / "evaluate").glob("*.txt"))
    assert len(hook("localinfer.apps.evaluate")["datas"]) == len(texts) == 2
