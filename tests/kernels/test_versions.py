"""Two versions never share compiled code, however they are installed: as files, as bytecode, in a zip, or frozen."""

import json
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
KEYS = """
import json
from localinfer.storage import fingerprint
from localinfer.kernels.jit import object_cache
from localinfer.kernels.cuda import kernel_cache
object_cache.cache_folder = lambda: object_cache.Path({folder!r}) / "cpu"
kernel_cache.installed_version = lambda name: "1"
folder = str(kernel_cache.cache_folder())
print(json.dumps([object_cache.source_hash(), folder, fingerprint._code(), object_cache.__file__]))
"""
CHANGED = {"cpu": "kernels/layouts.py", "cuda": "kernels/cuda/gemm.py", "models": "models/decoder/positions.py"}


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Path]]:
    """What `setup.py` builds of the sources as they are, and with one of them changed, in every form."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("builds")
    processes = {}
    for name in ("as it is", *CHANGED):
        copy = folder / name / "source"
        for part in ("localinfer", "kernels", "models", "quant"):
            shutil.copytree(REPOSITORY / part, copy / part, ignore=shutil.ignore_patterns("__pycache__", "*.gguf"))
        for part in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(REPOSITORY / part, copy)
        if name in CHANGED:
            with (copy / CHANGED[name]).open("a", encoding="utf-8") as file:
                file.write("\nANOTHER_VERSION = True\n")
        code = (
            f"import runpy, sys; sys.argv[1:] = {['-q', 'build_py', '--build-lib', str(folder / name / 'files')]!r}\n"
        )
        processes[name] = start(code + "runpy.run_path('setup.py')", copy)
    for process in processes.values():
        finish(process)
    made = {"as it is": in_every_form(folder / "as it is")}
    return made | {name: in_every_form(folder / name, made["as it is"]) for name in CHANGED}


def in_every_form(folder: Path, like: dict[str, Path] | None = None) -> dict[str, Path]:
    """The same build as bytecode without its sources, and in a zip; like: another one, where most files are equal."""
    files, bytecode, archive = folder / "files", folder / "bytecode", folder / "localinfer.zip"
    with zipfile.ZipFile(archive, "w") as zipped:
        for path in files.rglob("*.py"):
            zipped.write(path, path.relative_to(files))
    shutil.copytree(files if like is None else like["bytecode"], bytecode)
    for path in files.rglob("*.py"):
        name = path.relative_to(files)
        if like is None or path.read_bytes() != (like["files"] / name).read_bytes():
            py_compile.compile(str(path), str((bytecode / name).with_suffix(".pyc")), doraise=True)
    for path in bytecode.rglob("*.py"):
        path.unlink()
    return {"files": files, "bytecode": bytecode, "zip": archive}


def keys_of(place: Path, folder: Path, *, is_frozen: bool = False) -> tuple[list[str], str]:
    """The hash of the CPU's kernels, the folder of the GPU's and the hash of all that computes; then the warnings."""
    code = KEYS.format(folder=str(folder))
    if is_frozen:
        code = f"import sys; sys.frozen = True\n{code}"
    # Where it was started counts as well for Python.
    output, errors = finish(start(code, folder, PYTHONPATH=str(place), XDG_CACHE_HOME=str(folder)))
    *keys, file = json.loads(output)
    assert Path(file).is_relative_to(place), "another copy of the package was imported"
    return keys, errors


@pytest.mark.parametrize("form", FORMS)
def test_two_versions_differ_in_what_they_keep_in_every_form(builds, form: str, tmp_path: Path) -> None:
    is_frozen = form == "frozen"
    found = {
        name: keys_of(builds[name]["zip" if is_frozen else form], tmp_path, is_frozen=is_frozen)[0] for name in builds
    }
    cpu, cuda, code = found["as it is"]
    other = {name: found[name] for name in CHANGED}
    assert other["cpu"][0] != cpu and other["cpu"][1] != cuda and other["cpu"][2] != code
    assert other["cuda"][0] == cpu or form == "bytecode"
    assert other["cuda"][1] != cuda and other["cuda"][2] != code
    assert other["models"][2] != code


def test_a_zip_shares_with_the_files_it_was_made_of_and_with_the_checkout(builds, tmp_path: Path) -> None:
    zipped, errors = keys_of(builds["as it is"]["zip"], tmp_path)
    assert errors == ""
    assert zipped == keys_of(builds["as it is"]["files"], tmp_path)[0]
    here = {
        name: digest
        for package in ("kernels", "models")
        for name, digest in digests_of(package, REPOSITORY / package).items()
        if not name.startswith(NOT_COMPUTING)
    }
    assert zipped[2] == combined(here)


def test_files_that_were_edited_after_the_build_count_as_they_are(builds, tmp_path: Path) -> None:
    copy = tmp_path / "edited"
    shutil.copytree(builds["as it is"]["files"], copy)
    with (copy / "localinfer" / "kernels" / "ops.py").open("a", encoding="utf-8") as file:
        file.write("\n# edited\n")
    assert keys_of(copy, tmp_path)[0][0] != keys_of(builds["as it is"]["files"], tmp_path)[0][0]


def test_sources_without_influence_on_results_void_no_cache(builds, tmp_path: Path) -> None:
    copy = tmp_path / "edited"
    shutil.copytree(builds["as it is"]["files"], copy)
    with (copy / "localinfer" / "models" / "calibration" / "run.py").open("a", encoding="utf-8") as file:
        file.write("\n# edited\n")
    assert keys_of(copy, tmp_path) == keys_of(builds["as it is"]["files"], tmp_path)


def test_without_files_and_without_what_a_build_writes_nothing_is_shared(builds, tmp_path: Path) -> None:
    archive = tmp_path / "unknown.zip"
    with zipfile.ZipFile(builds["as it is"]["zip"]) as whole, zipfile.ZipFile(archive, "w") as zipped:
        for name in whole.namelist():
            zipped.writestr(name, b"DIGESTS = {}\n" if name.endswith("built_sources.py") else whole.read(name))
    code = "from localinfer.kernels.jit import object_cache; print(object_cache.cache_folder())"
    output, errors = finish(start(code, tmp_path, PYTHONPATH=str(archive), XDG_CACHE_HOME=str(tmp_path / "cache")))
    assert output == "None" and not (tmp_path / "cache").exists()
    assert errors.count("RuntimeWarning") == 1 and "localinfer.kernels.built_sources" in errors
    first, second = (keys_of(archive, tmp_path)[0] for _ in range(2))
    assert first[:2] == second[:2] == [None, "None"]
    assert first[2] != second[2]


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
