"""The one step of a build that pyproject.toml cannot say: write down which sources a wheel was made of."""

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCE_DIGESTS = runpy.run_path(str(Path(__file__).resolve().parent / "kernels" / "versions.py"))


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
        lines = [
            '"""Which sources this was built from: written by the build."""',
            "",
            f'VERSION = "{self.distribution.get_version()}"',
            "DIGESTS: dict[str, str] = {",
            *(f'    "{name}": "{digest}",' for name, digest in digests.items()),
            "}",
        ]
        target = package / "kernels" / SOURCE_DIGESTS["BUILT"]
        # A new file: the one that was copied may be a hard link to the source.
        target.unlink()
        target.write_text("\n".join(lines) + "\n", encoding="utf-8")


setup(cmdclass={"build_py": BuildWithDigests})
