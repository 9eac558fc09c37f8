"""Builds: equal bytes from equal sources, a bill of materials in the wheel, a lock of the default install."""

import hashlib
import json
import os
import re
import runpy
import shutil
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import canonicalize_name, parse_wheel_filename

setuptools = pytest.importorskip("setuptools")
build_meta = pytest.importorskip("setuptools.build_meta")

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO = "models/demo/demo-f16.gguf"
PLATFORMS = {
    "manylinux_2_28_x86_64": ("linux", "x86_64"),
    "manylinux_2_28_aarch64": ("linux", "aarch64"),
    "macosx_14_0_arm64": ("darwin", "arm64"),
    "win_amd64": ("win32", "AMD64"),
}


@pytest.fixture(scope="module")
def build_steps() -> Iterator[dict[str, Any]]:
    """The names of setup.py, run without a command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setuptools, "setup", lambda **_: None)
        patch.setenv("SOURCE_DATE_EPOCH", "315532800")
        umask = os.umask(0o022)
        yield runpy.run_path(str(REPOSITORY / "setup.py"))
        os.umask(umask)


@pytest.fixture(scope="module")
def locked() -> list[dict[str, Any]]:
    return tomllib.loads((REPOSITORY / "pylock.toml").read_text(encoding="utf-8"))["packages"]


PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "localinfer"
version = "1"
license = "MIT"
dependencies = ["numpy>=1.26,<3"]
[tool.setuptools]
packages = ["localinfer", "localinfer.kernels", "localinfer.models"]
[tool.setuptools.package-dir]
localinfer = "localinfer"
"localinfer.kernels" = "kernels"
"localinfer.models" = "models"
[tool.setuptools.package-data]
localinfer = ["words.txt"]
"""


def small_project(folder: Path, mode: int, time: int) -> Path:
    """A project of few files with this one's setup.py, whose files have a mode and a time."""
    for name in ("setup.py", "pylock.toml", "MANIFEST.in", "kernels/versions.py", "kernels/built_sources.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPOSITORY / name, folder / name)
    (folder / "pyproject.toml").write_text(PYPROJECT, encoding="utf-8")
    for name in ("localinfer/__init__.py", "localinfer/words.txt", "kernels/__init__.py", "models/__init__.py", DEMO):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n", encoding="utf-8")
    for file in folder.rglob("*.*"):
        file.chmod(mode)
        os.utime(file, (time, time))
    return folder


@pytest.mark.filterwarnings("ignore:::setuptools")
def test_modes_times_and_places_change_no_byte_of_a_build(tmp_path, monkeypatch, capfd):
    monkeypatch.delenv("SOURCE_DATE_EPOCH", raising=False)
    built = []
    for place, mode, time, umask in (("a", 0o644, 1_600_000_000, 0o022), ("another", 0o600, 1_700_000_000, 0o077)):
        monkeypatch.chdir(small_project(tmp_path / place, mode, time))
        before = os.umask(umask)
        try:
            files = [getattr(build_meta, f"build_{kind}")("out") for kind in ("wheel", "sdist")]
        finally:
            os.umask(before)
            os.environ.pop("SOURCE_DATE_EPOCH", None)
        built.append([(tmp_path / place / "out" / name).read_bytes() for name in files])
    assert built[0] == built[1]
    wheel, archive = (tmp_path / "a" / "out" / name for name in files)
    with zipfile.ZipFile(wheel) as zipped, tarfile.open(archive) as packed:
        in_wheel, in_archive = zipped.namelist(), packed.getnames()
    assert {"localinfer/words.txt", "localinfer-1.dist-info/sboms/localinfer.cdx.json"} <= set(in_wheel)
    assert {"localinfer-1/pylock.toml", "localinfer-1/setup.py", "localinfer-1/PKG-INFO"} <= set(in_archive)


def test_the_bill_names_every_package_and_the_weights(build_steps, locked):
    bill = build_steps["bill_of_materials"]("7.8")
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    demo, *packages = bill["components"]
    file = REPOSITORY / demo["bom-ref"]
    assert demo["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(file.read_bytes()).hexdigest()}]
    assert [(one["name"], one["version"]) for one in packages] == [(one["name"], one["version"]) for one in locked]
    references = [one["bom-ref"] for one in bill["components"]]
    assert len(set(references)) == len(references)
    (edges,) = bill["dependencies"]
    assert edges["ref"] == bill["metadata"]["component"]["purl"] == "pkg:pypi/localinfer@7.8"
    assert set(edges["dependsOn"]) <= set(references)
    wanted = {canonicalize_name(one.name) for one in direct_requirements()}
    assert {one["name"] for one in packages if one["bom-ref"] in edges["dependsOn"]} == wanted
    assert json.loads(json.dumps(bill)) == bill


def direct_requirements() -> list[Requirement]:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    return [Requirement(line) for line in settings["project"]["dependencies"]]


def test_the_lock_holds_what_pyproject_wants(locked):
    versions: dict[str, list[str]] = {}
    for one in locked:
        versions.setdefault(one["name"], []).append(one["version"])
    for wanted in direct_requirements():
        found = versions[canonicalize_name(wanted.name)]
        assert all(wanted.specifier.contains(version) for version in found), f"{wanted} but {found} is locked"


def test_the_guide_says_what_each_package_is_for():
    text = (REPOSITORY / "docs" / "install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([\w, -]+) \| .*\|$", text.partition("## What each package")[2].partition("\n## ")[0], re.M)
    told = {canonicalize_name(name) for row in rows[1:] for name in row.split(", ")}
    assert told == {canonicalize_name(one.name) for one in direct_requirements()}
    assert f"its {len(direct_requirements())} packages" in text


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("python", ["311", "312", "313", "314"])
def test_every_locked_package_has_a_wheel_with_a_hash(locked, platform, python):
    system, machine = PLATFORMS[platform]
    here = {"sys_platform": system, "platform_machine": machine, "python_full_version": f"3.{python[1:]}.0"}
    for one in locked:
        if "marker" in one and not Marker(one["marker"]).evaluate({**here, "python_version": f"3.{python[1:]}"}):
            continue
        for file in one["wheels"]:
            assert len(bytes.fromhex(file["hashes"]["sha256"])) == 32 and file["url"].startswith("https://")
        tags = {tag for file in one["wheels"] for tag in parse_wheel_filename(file["url"].rpartition("/")[2])[3]}
        assert any(fits(tag, platform, python) for tag in tags), f"{one['name']} has no wheel for {platform}"


def fits(tag: Tag, platform: str, python: str) -> bool:
    """Return whether a wheel's tag is of a system and of this Python or, with a stable ABI, an older one."""
    pythons = {f"cp{python}", "py3", "py311"}
    is_stable = tag.abi == "abi3" and tag.interpreter.startswith("cp3") and int(tag.interpreter[2:]) <= int(python)
    head, tail = platform.partition("_")[0], "x86_64" if "x86" in platform else platform.rpartition("_")[2]
    is_here = tag.platform == "any" or (
        tag.platform.startswith(head[:5]) and tag.platform.endswith((tail, "universal2"))
    )
    return is_here and (is_stable or tag.interpreter in pythons)
