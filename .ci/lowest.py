"""Print the lowest version of everything that pyproject.toml wants, a line for each: constraints for pip.

usage: python .ci/lowest.py EXTRA...; what an extra wants is added to what every install does.
"""

import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parents[1] / "pyproject.toml"


def lowest_versions(extras: list[str]) -> dict[str, str]:
    """The lowest version that the requirements of an install with some extras allow, by distribution."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    found = {}
    for one in map(Requirement, lines):
        (version,) = (bound.version for bound in one.specifier if bound.operator == ">=")
        found[canonicalize_name(one.name)] = version
    return found


if __name__ == "__main__":
    for name, version in sorted(lowest_versions(sys.argv[1:]).items()):
        print(f"{name}=={version}")
