"""Two versions never share compiled code, however they are installed: as files, as bytecode, in a zip, or frozen."""

import json
import os
import py_compile
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest

from localinfer.kernels import versions
from localinfer.kernels.cuda.kernel_cache import SHARED_SOURCES
from localinfer.kernels.versions import combined, digests_of
from localinfer.storage.fingerprint import NOT_COMPUTING
from tests.kernels.subprocesses import REPOSITORY, finish, start

FORMS = ("files", "bytecode", "zip", "frozen")
CHANGED = {"cpu": "kernels/layouts.py", "cuda": "kernels/cuda/gemm.py", "models": "models/decoder/positions.py"}
UNUSED = "models/calibration/run.py"
"""What no result depends on."""
IRRELEVANT = ("apps", "engine", "generation")
"""Packages that what computes the keys does not import: compiling them to bytecode would take a third of the time."""

BUILD = """
import json, os, runpy, sys
for source, target in json.loads({builds!r}):
    os.chdir(source)
    sys.argv[1:] = ["-q", "build_py", "--build-lib", target]
    runpy.run_path("setup.py")
"""
KEYS = """
import contextlib, io, json, sys

def keys(place, is_frozen):
    for name in [name for name in sys.modules if name.partition(".")[0] == "localinfer"]:
        del sys.modules[name]
    sys.frozen = is_frozen
    sys.path[0] = place
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        from localinfer.storage import fingerprint
        from localinfer.kernels.jit import object_cache
        from localinfer.kernels.cuda import kernel_cache
        object_cache.cache_folder = lambda: object_cache.Path({folder!r}) / "cpu"
        kernel_cache.installed_version = lambda name: "1"
        folder = str(kernel_cache.cache_folder())
        found = [object_cache.source_hash(), folder, fingerprint._code()]
    return *found, errors.getvalue(), object_cache.__file__

sys.path.insert(0, "")
print(json.dumps([keys(*where) for where in json.loads({places!r})]))
"""
Keys = tuple[str | None, str, str, str]
"""The hash of the CPU's kernels, the folder of the GPU's and the hash of all that computes; then the warnings."""


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """What `setup.py` builds of the sources as they are, and with one of them changed, in every form."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("builds")
    whole = folder / "as it is" / "source"
    for part in ("localinfer", "kernels", "models", "quant"):
        shutil.copytree(REPOSITORY / part, whole / part, ignore=shutil.ignore_patterns("__pycache__", "*.gguf"))
    for part in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / part, whole)
    for name, changed in CHANGED.items():
        edit(copied(whole, folder / name / "source") / changed)
    finish(start(BUILD.format(builds=json.dumps([[f"{path}/source", f"{path}/files"] for path in folder.iterdir()]))))
    made = {"as it is": in_every_form(folder / "as it is")}
    return made | {name: in_every_form(folder / name, made["as it is"]) for name in CHANGED}


def copied(folder: Path, to: Path) -> Path:
    """The same files at another place, which share their bytes until `edit` replaces them."""
    return Path(shutil.copytree(folder, to, copy_function=os.link))


def edit(path: Path) -> None:
    """Add a line to a source."""
    text = path.read_text(encoding="utf-8")
    path.unlink()
    path.write_text(f"{text}\nANOTHER_VERSION = True\n", encoding="utf-8")


def in_every_form(folder: Path, like: dict[str, Path] | None = None) -> dict[str, Path]:
    """The same build as bytecode without its sources, and in a zip; like: another one, where most files are equal."""
    files, bytecode, archive = folder / "files", folder / "bytecode", folder / "localinfer.zip"
    sources = [path.relative_to(files) for path in files.rglob("*.py")]
    with zipfile.ZipFile(archive, "w") as zipped:
        for name in sources:
            zipped.write(files / name, name)
    if like is not None:
        copied(like["bytecode"], bytecode)
    for name in sources:
        if name.parts[1] in IRRELEVANT or (
            like is not None and (files / name).read_bytes() == (like["files"] / name).read_bytes()
        ):
            continue
        compiled = (bytecode / name).with_suffix(".pyc")
        compiled.unlink(missing_ok=True)
        py_compile.compile(str(files / name), str(compiled), doraise=True)
    return {"files": files, "bytecode": bytecode, "zip": archive, "frozen": archive}


@pytest.fixture(scope="module")
def unknown(builds: dict[str, dict[str, Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A zip without what a build writes."""
    archive = tmp_path_factory.mktemp("unknown") / "unknown.zip"
    with zipfile.ZipFile(builds["as it is"]["zip"]) as whole, zipfile.ZipFile(archive, "w") as zipped:
        for name in whole.namelist():
            zipped.writestr(name, b"DIGESTS = {}\n" if name.endswith("built_sources.py") else whole.read(name))
    return archive


@pytest.fixture(scope="module")
def keys(
    builds: dict[str, dict[str, Path]], unknown: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, str], Keys]:
    """The keys of each build in each form, and of some that were edited afterwards; all computed in one process."""
    folder = tmp_path_factory.mktemp("keys")
    places = {(name, form): builds[name][form] for name in builds for form in FORMS}
    files = builds["as it is"]["files"]
    for name, path in {"edited": CHANGED["cpu"], "edited without influence": UNUSED}.items():
        places[name, "files"] = copied(files, folder / name)
        edit(places[name, "files"] / "localinfer" / path)
    places["unknown", "zip"] = places["unknown again", "zip"] = unknown
    asked = [(str(place), form == "frozen") for (_, form), place in places.items()]
    code = KEYS.format(folder=str(folder), places=json.dumps(asked))
    output, errors = finish(start(code, folder, XDG_CACHE_HOME=str(folder / "cache")))
    assert errors == ""
    found = {}
    for (which, place), (*values, file) in zip(places.items(), json.loads(output), strict=True):
        assert Path(file).is_relative_to(place), "another copy of the package was imported"
        found[which] = tuple(values)
    return found


@pytest.mark.parametrize("form", FORMS)
def test_two_versions_differ_in_what_they_keep_in_every_form(keys, form: str) -> None:
    cpu, cuda, code, _ = keys["as it is", form]
    other = {name: keys[name, form] for name in CHANGED}
    assert other["cpu"][0] != cpu and other["cpu"][1] != cuda and other["cpu"][2] != code
    assert other["cuda"][0] == cpu or form == "bytecode"
    assert other["cuda"][1] != cuda and other["cuda"][2] != code
    assert other["models"][2] != code


def test_a_zip_shares_with_the_files_it_was_made_of_and_with_the_checkout(keys) -> None:
    zipped = keys["as it is", "zip"]
    assert zipped[3] == ""
    assert zipped == keys["as it is", "files"]
    here = {
        name: digest
        for package in ("kernels", "models")
        for name, digest in digests_of(package, REPOSITORY / package).items()
        if not name.startswith(NOT_COMPUTING)
    }
    assert zipped[2] == combined(here)


def test_files_that_were_edited_after_the_build_count_as_they_are(keys) -> None:
    assert keys["edited", "files"] == keys["cpu", "files"] != keys["as it is", "files"]


def test_sources_without_influence_on_results_void_no_cache(keys) -> None:
    assert keys["edited without influence", "files"] == keys["as it is", "files"]


def test_without_files_and_without_what_a_build_writes_nothing_is_shared(keys, unknown, tmp_path: Path) -> None:
    first, second = keys["unknown", "zip"], keys["unknown again", "zip"]
    assert first[:2] == second[:2] == (None, "None")
    assert first[2] != second[2]
    code = "from localinfer.kernels.jit import object_cache; print(object_cache.cache_folder())"
    output, errors = finish(start(code, tmp_path, PYTHONPATH=str(unknown), XDG_CACHE_HOME=str(tmp_path / "cache")))
    assert output == "None" and not (tmp_path / "cache").exists()
    assert errors.count("RuntimeWarning") == 1 and "localinfer.kernels.built_sources" in errors


def test_sources_beside_a_frozen_application_are_not_taken_for_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.source_digests("kernels")
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    assert versions.source_digests("kernels") is None


def test_a_checkout_says_nothing_of_a_build() -> None:
    from localinfer.kernels import built_sources

    if not Path(built_sources.__file__).resolve().is_relative_to(REPOSITORY):
        pytest.skip("this package is installed from a build")
    assert (built_sources.VERSION, built_sources.DIGESTS) == ("", {})


def test_versions_are_known_where_metadata_was_left_behind(builds, tmp_path: Path) -> None:
    code = (
        "from importlib import metadata\n"
        "def version(name): raise metadata.PackageNotFoundError(name)\n"
        "metadata.version = version\n"
        "from localinfer.kernels.jit.object_cache import cache_key\n"
        "from localinfer.kernels.versions import installed_version\n"
        "import llvmlite; assert f'-llvmlite{llvmlite.__version__}-' in cache_key()\n"
        "print(installed_version('localinfer'))"
    )
    place = builds["as it is"]["zip"]
    output, _ = finish(start(code, tmp_path, PYTHONPATH=str(place), XDG_CACHE_HOME=str(tmp_path)))
    assert output == "0.1.0"


def test_the_key_of_cuda_kernels_covers_all_that_they_import() -> None:
    sources = [path.read_text() for path in (REPOSITORY / "kernels" / "cuda" / "compiled").glob("*.py")]
    modules = {
        name for source in sources for name in re.findall(r"(?m)^from localinfer\.(kernels[\w.]*) import", source)
    }
    files = {name.replace(".", "/") + ".py" for name in modules if not name.startswith("kernels.cuda")}
    assert files == set(SHARED_SOURCES)
