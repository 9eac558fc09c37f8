"""Rules of the house that no linter knows."""

import ast
import os
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.limits import seconds

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("localinfer", "kernels", "models", "quant")
SOURCES = sorted(path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*.py"))
MAY_PRINT = ("localinfer/apps/cli/__init__.py", "localinfer/apps/terminal/loop.py")
VAGUE_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc"}
NUMBA_DECORATORS = {"njit", "jit", "vectorize", "guvectorize", "cfunc", "stencil"}
LONGEST_FILE = 800


def relative(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


def nodes(path: Path, pattern: str) -> Iterator[ast.AST]:
    """The nodes of a file; none where the pattern, which what is looked for cannot do without, is not in its text."""
    with tokenize.open(path) as file:
        text = file.read()
    return ast.walk(ast.parse(text)) if re.search(pattern, text) else iter(())


def violations(paths: list[Path], pattern: str, is_bad: Callable[[ast.AST], bool]) -> list[str]:
    return [f"{relative(path)}:{node.lineno}" for path in paths for node in nodes(path, pattern) if is_bad(node)]


def called_name(node: ast.AST) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else None


def test_sources_are_found():
    assert len(SOURCES) > 20


def test_only_faces_print():
    quiet = [path for path in SOURCES if not relative(path).startswith(MAY_PRINT)]
    assert violations(quiet, "print", lambda node: called_name(node) == "print") == []


def test_threads_belong_to_the_tape():
    def is_parallel(node: ast.AST) -> bool:
        named = (isinstance(node, ast.Name) and node.id == "prange") or (
            isinstance(node, ast.Attribute) and node.attr == "prange"
        )
        option = isinstance(node, ast.Call) and called_name(node) in NUMBA_DECORATORS
        return named or (option and any(word.arg == "parallel" for word in node.keywords))

    assert violations(SOURCES, "prange|parallel", is_parallel) == []


def test_kernels_are_linked_with_nothing():
    """Code reached through `link=` is outside the cache's key."""
    assert violations(SOURCES, "link", lambda node: isinstance(node, ast.keyword) and node.arg == "link") == []


def test_numba_decorators_are_used_in_one_place_only():
    """Elsewhere their cache would lie beside the source and go stale."""

    def is_numba(node: ast.AST) -> bool:
        return (
            isinstance(node, ast.Attribute)
            and node.attr in NUMBA_DECORATORS
            and isinstance(node.value, ast.Name)
            and node.value.id in {"numba", "nb"}
        )

    elsewhere = [path for path in SOURCES if relative(path) != "kernels/jit/numba.py"]
    assert violations(elsewhere, r"\b(numba|nb)\b", is_numba) == []


def test_floors_are_imported_by_their_installed_names():
    def is_bare(node: ast.AST) -> bool:
        if isinstance(node, ast.Import):
            return any(name.name.split(".")[0] in {"kernels", "models", "quant"} for name in node.names)
        return (
            isinstance(node, ast.ImportFrom)
            and node.level == 0
            and (node.module or "").split(".")[0] in {"kernels", "models", "quant"}
        )

    tests = sorted((REPOSITORY / "tests").rglob("*.py"))
    assert violations(SOURCES + tests, r"(from|import|,)\s*(kernels|models|quant)\b", is_bare) == []


def test_no_handler_catches_everything_in_silence():
    def is_bare(node: ast.AST) -> bool:
        return isinstance(node, ast.ExceptHandler) and node.type is None

    assert violations(SOURCES, r"except\s*:", is_bare) == []


def test_file_names_say_what_files_hold():
    assert [relative(path) for path in SOURCES if path.stem in VAGUE_NAMES] == []


def test_names_of_test_files_are_unique():
    """Folders without `__init__.py` are collected by the names of files alone, and a second one is an error."""
    names = Counter(path.name for path in (REPOSITORY / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_files_stay_short():
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > LONGEST_FILE} == {}


def test_every_module_says_what_it_is():
    def has_docstring(path: Path) -> bool:
        text = path.read_text(encoding="utf-8")
        return not text.strip() or text.startswith('"""') or ast.get_docstring(ast.parse(text)) is not None

    assert [relative(path) for path in SOURCES if not has_docstring(path)] == []


@pytest.mark.parametrize("folder", [*FOLDERS, "tests"])
def test_every_folder_has_a_readme(folder):
    assert (REPOSITORY / folder / "README.md").is_file()


def test_readme_commands_are_the_ones_ci_runs():
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    commands = [line for line in readme.splitlines() if line.startswith("python3 -m venv")]
    assert len(commands) == 2
    assert commands[0].endswith('.venv/bin/localinfer run -p "Once upon a time"')
    run = (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
    (tests,) = re.findall(r'^"\$python" (-m pytest .*) \|\| status=\$\?$', run, re.MULTILINE)
    assert commands[1].endswith(f".venv/bin/python {tests}")


@pytest.mark.skipif(os.name == "nt", reason="no executable bit there")
def test_ci_script_can_be_run():
    assert os.access(REPOSITORY / ".ci" / "run", os.X_OK)


def test_python_run_in_a_checkout_finds_the_floors_beside_the_package() -> None:
    code = (
        "import sys; sys.meta_path[:] = [one for one in sys.meta_path if 'editable' not in repr(one).lower()]\n"
        "import localinfer.kernels.ops, localinfer.models, localinfer.quant; print(localinfer.kernels.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=seconds(15)
    )
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == REPOSITORY / "kernels" / "__init__.py"
