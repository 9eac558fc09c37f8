"""Steps of a build that pyproject.toml cannot express: digests of the sources, packs of kernels, a bill of materials.

Two builds of the same sources give the same wheel and the same source archive: times, owners, modes and the order of
files do not depend on when, where and by whom they are built.

With LOCALINFER_BUILD_PACKS naming the folder that `localinfer warmup --packs FOLDER` wrote from the same sources, the
wheel has these compiled kernels and is one for this system. Without it the wheel is for every system.
"""

import gzip
import hashlib
import json
import os
import runpy
import tarfile
import tomllib
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).resolve().parent
SOURCE_DIGESTS = runpy.run_path(str(ROOT / "kernels" / "versions.py"))
PACKS = os.environ.get("LOCALINFER_BUILD_PACKS")
LOCK = "pylock.toml"
DEMO = "models/demo/demo-f16.gguf"

os.environ.setdefault("SOURCE_DATE_EPOCH", "315532800")
"""The time of all files in what is built: the first of January 1980, the earliest that a zip can hold."""
os.umask(0o022)


class BuildWithDigests(build_py):
    """Replaces `built_sources` in what is built; an editable install keeps the one that says nothing."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "localinfer"
        digests: dict[str, str] = {}
        for name in SOURCE_DIGESTS["PACKAGES"]:
            digests |= SOURCE_DIGESTS["digests_of"](name, package / name)
        packs = self._take_packs(
            package / "kernels" / "packs", SOURCE_DIGESTS["digests_of"]("kernels", package / "kernels")
        )
        lines = [
            '"""Which sources this was built from, and which packs it has: written by the build."""',
            "",
            f'VERSION = "{self.distribution.get_version()}"',
            "DIGESTS: dict[str, str] = {",
            *(f'    "{name}": "{digest}",' for name, digest in digests.items()),
            "}",
            "PACKS: dict[str, str] = {",
            *(f'    "{name}": "{digest}",' for name, digest in packs.items()),
            "}",
        ]
        target = package / "kernels" / SOURCE_DIGESTS["BUILT"]
        # A new file: the one that was copied may be a hard link to the source.
        target.unlink()
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def _take_packs(self, folder: Path, digests: dict[str, str]) -> dict[str, str]:
        """Copy the packs, which have to be of these sources; digests of their indices by name."""
        taken = {}
        for old in folder.glob("*.pack"):
            old.unlink()
        sources = SOURCE_DIGESTS["combined"](SOURCE_DIGESTS["cpu_kernels"](digests))
        wanted = {"version": self.distribution.get_version(), "sources": sources}
        for path in sorted(Path(PACKS).glob("*.pack")) if PACKS else ():
            content = path.read_bytes()
            index = content[40 : 40 + int.from_bytes(content[32:40], "little")]
            if (
                hashlib.sha256(index).digest() != content[:32]
                or not wanted.items() <= json.loads(index)["origin"].items()
            ):
                raise SystemExit(
                    f"{path} is not of these sources; make it again with `localinfer warmup --packs {PACKS}`"
                )
            folder.mkdir(exist_ok=True)
            (folder / path.name).write_bytes(content)
            taken[path.name] = content[:32].hex()
        if PACKS and not taken:
            raise SystemExit(f"{PACKS} has no packs; make them with `localinfer warmup --packs {PACKS}`")
        return taken


class WheelWithMaterials(bdist_wheel):
    """Adds the bill of materials to a wheel's metadata, in `sboms/` (PEP 770); one with packs is for this system."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if PACKS:
            self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, system = super().get_tag()
        return ("py3", "none", system) if PACKS else (python, abi, system)

    def egg2dist(self, egginfo_path: str, distinfo_path: str) -> None:
        super().egg2dist(egginfo_path, distinfo_path)
        folder = Path(distinfo_path) / "sboms"
        folder.mkdir()
        bill = bill_of_materials(self.distribution.get_version())
        (folder / "localinfer.cdx.json").write_text(json.dumps(bill, indent=1) + "\n", encoding="utf-8")
        # Copied files may have a checkout's modes.
        for file in (found for top in (distinfo_path, self.bdist_dir) for found in Path(top).rglob("*")):
            file.chmod(0o755 if file.is_dir() else 0o644)


class ArchiveOfEqualBytes(sdist):
    """Writes the source archive without times, owners and modes of the machine."""

    def make_archive(self, base_name: Any, format: str, root_dir: Any = None, base_dir: Any = None, **_: Any) -> str:
        if format != "gztar":
            raise SystemExit(f"a source archive is made as gztar, and {format} was asked for; leave out --formats")
        path = f"{base_name}.tar.gz"
        folder = Path(root_dir or ".")
        with (
            open(path, "wb") as raw,
            gzip.GzipFile("", "wb", 9, raw, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
        ):
            for file in sorted(found for found in (folder / base_dir).rglob("*") if found.is_file()):
                entry = tarfile.TarInfo(file.relative_to(folder).as_posix())
                entry.size, entry.mtime, entry.mode = file.stat().st_size, int(os.environ["SOURCE_DATE_EPOCH"]), 0o644
                with open(file, "rb") as source:
                    archive.addfile(entry, source)
        return path


def bill_of_materials(version: str) -> dict[str, Any]:
    """CycloneDX 1.6: the packages of a default install as they are locked, and the weights that the wheel carries."""
    direct = {requirement_name(line) for line in settings()["project"]["dependencies"]}
    components: list[dict[str, Any]] = []
    for package in tomllib.loads((ROOT / LOCK).read_text(encoding="utf-8"))["packages"]:
        purl = f"pkg:pypi/{package['name']}@{package['version']}"
        component = {"type": "library", "bom-ref": purl, "name": package["name"], "version": package["version"]}
        component |= {"purl": purl, "properties": [{"name": "marker", "value": package["marker"]}]}
        components.append(component)
    itself = f"pkg:pypi/localinfer@{version}"
    wanted = [one["bom-ref"] for one in components if one["name"] in direct]
    demo = {"type": "machine-learning-model", "bom-ref": DEMO, "name": Path(DEMO).name, "licenses": [license_of("MIT")]}
    demo["hashes"] = [{"alg": "SHA-256", "content": hashlib.sha256((ROOT / DEMO).read_bytes()).hexdigest()}]
    application = {"type": "application", "bom-ref": itself, "name": "localinfer", "version": version, "purl": itself}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": application | {"licenses": [license_of("MIT")]}},
        "components": [demo, *components],
        "dependencies": [{"ref": itself, "dependsOn": [DEMO, *wanted]}],
    }


def license_of(name: str) -> dict[str, Any]:
    return {"license": {"id": name}}


def requirement_name(line: str) -> str:
    """The normalized name in a requirement: what stands before its bounds."""
    name = line.partition(">")[0].partition("[")[0].strip()
    return name.lower().replace("_", "-").replace(".", "-")


def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


setup(cmdclass={"bdist_wheel": WheelWithMaterials, "build_py": BuildWithDigests, "sdist": ArchiveOfEqualBytes})
