"""Figures of the code's structure: `python -m tests.project.figures`; `test_figures.py` holds the bounds.

--request also traces a streamed chat request, and --token a decoded token, which takes a model's load each; --load says
which functions a load and a completion call, by module; --suite times the tests from an empty cache of kernels, all of
them and those without processes and sockets, or those of the paths behind it.
"""

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
import time
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = {
    "localinfer": "localinfer",
    "kernels": "localinfer.kernels",
    "models": "localinfer.models",
    "quant": "localinfer.quant",
}
"""Top-level folders, and the names that they are installed by."""
SPINE = (
    "localinfer/engine/**/*.py",
    "kernels/*.py",
    "kernels/ops/*.py",
    "kernels/cpu/lower/*.py",
    "kernels/cpu/{tape,program,memory,kernel_abi,parameters,weights}.py",
    "models/decoder/{decoder,attention,feed_forward,graph,config,architecture}.py",
)
"""The engine core: from token ids to token ids, with the programs of kernels."""
_BESIDE = ("kernels/built_sources.py", "kernels/versions.py", "kernels/address_space.py")
"""Beside the ops, and no part of the spine."""
_SHORT = 80
_IMPORT = re.compile(r"^[ \t]*(?:import ([^\n(]+)|from ([\w.]+) import (\([^)]*\)|[^\n(]*))", re.MULTILINE)
_CLASS = re.compile(r"^(?:@(?:[^\n]*\n(?:[ )][^\n]*\n)*))*class [^\n]*\n(?:(?:[ )][^\n]*)?\n)*", re.MULTILINE)
_QUESTION = re.compile(r'"""(?:What|Whether|Who|Whose|Which|Where|How)\b')
_OPTIONS = ("gpu_layers", "kv_window", "ttft_objective")
_LOAD = """
import sys, localinfer
with localinfer.load(threads=1, speculation=None) as llm:
    llm.complete("Once", max_tokens=2)
print(*sorted(module.__file__ for name, module in sys.modules.items()
              if name.partition(".")[0] == "localinfer" and getattr(module, "__file__", None)), sep="\\n")
"""

_MOSTLY = 0.6
"""Share of a module's lines that no function called has, from which on it is mostly not used."""
_CALLED = """
import sys, threading
calls = set()
def note(frame, event, argument):
    if event == "call":
        calls.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
threading.setprofile(note)
sys.setprofile(note)
import localinfer
with localinfer.load(threads=1, speculation=None) as llm:
    llm.complete("Once", max_tokens=2)
sys.setprofile(None)
print(*(f"{path}:{line}" for path, line in calls), sep="\\n")
"""


@cache
def sources() -> dict[str, Path]:
    """Every module of the packages by its installed name."""
    found = {}
    for folder, installed in PACKAGES.items():
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            parts = path.relative_to(REPOSITORY / folder).with_suffix("").parts
            found[".".join([installed, *(part for part in parts if part != "__init__")])] = path
    return found


@cache
def text_of(path: Path) -> str:
    """The text of a source file."""
    with tokenize.open(path) as file:
        return file.read()


def num_lines(paths: list[Path]) -> int:
    """Lines of files together."""
    return sum(len(text_of(path).splitlines()) for path in paths)


def spine() -> list[Path]:
    """Files of the engine core."""
    found: set[Path] = set()
    for pattern in SPINE:
        before, brace, rest = pattern.partition("{")
        names, _, after = rest.partition("}")
        for name in names.split(",") if brace else [""]:
            found.update(REPOSITORY.glob(before + name + after))
    return sorted(found - {REPOSITORY / name for name in _BESIDE})


def loaded() -> list[Path]:
    """Files that `load(); complete()` of a Llama GGUF on the CPU imports."""
    done = subprocess.run([sys.executable, "-c", _LOAD], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [Path(line) for line in done.stdout.splitlines()]


def called() -> list[tuple[int, int, str]]:
    """Of each module that a load and a completion import, lines of functions that are not called, and all lines."""
    done = subprocess.run([sys.executable, "-c", _CALLED], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    found: dict[str, set[int]] = defaultdict(set)
    for line in done.stdout.splitlines():
        path, _, first = line.rpartition(":")
        found[path].add(int(first))
    names = {str(path): name for name, path in sources().items()}
    parts = []
    for path in loaded():
        uncalled = [
            node.end_lineno - first + 1
            for node in _outermost_uncalled(ast.parse(text_of(path)), found[str(path)])
            if node.end_lineno is not None
            for first in [_first_line(node)]
        ]
        parts.append((sum(uncalled), num_lines([path]), names[str(path)]))
    return sorted(parts, reverse=True)


def _outermost_uncalled(tree: ast.AST, first_lines: set[int]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions that were not called and lie in none that was not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not first_lines & {
            node.lineno,
            _first_line(node),
        }:
            yield node
        else:
            yield from _outermost_uncalled(node, first_lines)


def _first_line(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])


@cache
def imports() -> dict[str, set[str]]:
    """Modules that each module imports, also inside of functions."""
    modules, found = sources(), {}
    for name, path in modules.items():
        targets: set[str] = set()
        for plain, module, from_module in _IMPORT.findall(text_of(path)):
            words = re.sub(r"#.*|[()\\\n]", " ", plain or from_module)
            names = [one.split()[0] for one in words.split(",") if one.strip()]
            inner = {f"{module}.{one}" for one in names} & modules.keys()
            targets.update(names if plain else inner or {module})
        found[name] = (targets & modules.keys()) - {name}
    return found


def slivers() -> list[str]:
    """Modules under 80 lines that one module of their own package imports, and nothing else."""
    importers = defaultdict(set)
    for name, targets in imports().items():
        for target in targets:
            importers[target].add(name)
    return [
        name
        for name, path in sources().items()
        if path.name not in ("__init__.py", "built_sources.py")  # which a build replaces
        and num_lines([path]) < _SHORT
        and len(importers[name]) == 1
        and next(iter(importers[name])).rpartition(".")[0] == name.rpartition(".")[0]
    ]


@cache
def _classes() -> list[tuple[str, ast.ClassDef]]:
    """Classes of modules, with the module; a syntax tree of all the code would take ten times as long."""
    found = []
    for name, path in sources().items():
        for text in _CLASS.findall(text_of(path)):
            found += [(name, node) for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    return found


def doubled_names() -> dict[str, list[str]]:
    """Public names of classes that stand for two things, with their modules."""
    found = defaultdict(list)
    for module, node in _classes():
        if not node.name.startswith("_"):
            found[node.name].append(module)
    return {name: modules for name, modules in sorted(found.items()) if len(modules) > 1}


def explained_above() -> list[str]:
    """Records that explain three fields or more in the paragraph above the class, and not each under itself."""
    found = []
    for module, node in _classes():
        is_record = any("dataclass" in ast.unparse(one) for one in node.decorator_list)
        is_record |= any(ast.unparse(base) in ("NamedTuple", "Record", "OpRecord") for base in node.bases)
        fields = [
            one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
        ]
        words = " ".join((ast.get_docstring(node) or "").replace(",", " ").split())
        named = [name for name in fields if f" {name}:" in f" {words}"]
        if is_record and len(named) >= 3:
            found.append(f"{module}.{node.name}")
    return found


def question_words() -> list[str]:
    """Modules of docstrings that begin with a question word, in place of a noun or a verb."""
    return [name for name, path in sources().items() for _ in _QUESTION.findall(text_of(path))]


def option_files(option: str) -> list[Path]:
    """Files of the packages that name an option."""
    return [path for path in sources().values() if option in text_of(path)]


def contract_rows() -> tuple[int, int]:
    """Rows of the import contract of the whole, and contracts beside it."""
    import tomllib

    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    whole, *inner = settings["tool"]["importlinter"]["contracts"]
    assert whole["containers"] == ["localinfer"], "the contract of the whole is the first one"
    return len(whole["layers"]), len(inner)


def _traced(module: str) -> str:
    done = subprocess.run([sys.executable, "-m", module], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stderr.strip()[-200:]
    return "; ".join(line for line in done.stdout.splitlines() if " files, " in line)


def _suite(*options: str) -> str:
    """The minutes that tests take on two cores, and pytest's last line."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *options]
    with tempfile.TemporaryDirectory() as cache:
        began = time.monotonic()
        environment = {**os.environ, "XDG_CACHE_HOME": cache}
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
        minutes = (time.monotonic() - began) / 60
    said = (done.stdout.strip() or done.stderr.strip() or "pytest said nothing").splitlines()[-1]
    return f"{minutes:.1f} minutes, {said}"


def main() -> None:
    """Print every figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--request", action="store_true")
    parser.add_argument("--token", action="store_true")
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--suite", nargs="*", metavar="PATH", help="all tests, or those of these files and folders")
    parser.add_argument("--names", action="store_true", help="also what is counted")
    options = parser.parse_args()
    core, run, files = spine(), loaded(), list(sources().values())
    short, doubled, above = slivers(), doubled_names(), explained_above()
    print(f"spine: {len(core)} files, {num_lines(core):,} lines")
    print(f"load and complete: {len(run)} modules, {num_lines(run):,} lines")
    print(f"source: {len(files)} files, {num_lines(files):,} lines; longest {max(num_lines([one]) for one in files)}")
    print(f"modules under {_SHORT} lines that one module of their package imports: {len(short)}")
    print("rows of the import contract: {}, contracts beside it: {}".format(*contract_rows()))
    print(f"records explained above their fields: {len(above)}")
    print(f"class names that stand for two things: {len(doubled)}")
    print(f"docstrings that begin with a question word: {len(question_words())}")
    for option in _OPTIONS:
        print(f"files that name {option}: {len(option_files(option))}")
    if options.names:
        print("\nslivers:", *short, sep="\n  ")
        print("\ndoubled:", *(f"{name}: {', '.join(where)}" for name, where in doubled.items()), sep="\n  ")
        print("\nabove:", *above, sep="\n  ")
        packages = Counter(name.rsplit(".", 1)[0] for name in sources())
        print("\nfiles by package:", *(f"{name}: {count}" for name, count in sorted(packages.items())), sep="\n  ")
        print("\nspine:", *(path.relative_to(REPOSITORY) for path in core), sep="\n  ")
    if options.token:
        print("a decoded token:", _traced("tests.bench.trace_token"))
    if options.request:
        print("a chat request:", _traced("tests.bench.trace_request"))
    if options.load:
        print("a load and a completion, lines of functions that are never called, by module:")
        parts = called()
        print(*(f"  {unused:5} of {lines:5}  {name}" for unused, lines, name in parts), sep="\n")
        total, unused = sum(lines for _, lines, _ in parts), sum(unused for unused, _, _ in parts)
        whole = sum(lines for unused, lines, _ in parts if unused and unused >= _MOSTLY * lines)
        print(f"of {total:,} lines {unused:,} are of functions that it never calls; {whole:,} are of modules mostly so")
    if options.suite is not None:
        print("tests without processes and sockets:", _suite("-m", "not system", *options.suite))
        print("all tests:", _suite(*options.suite))


if __name__ == "__main__":
    main()
