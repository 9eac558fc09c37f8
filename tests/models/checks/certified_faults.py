"""Faults that are planted on whole models, and what their certificates say: `python -m` this module `[NAME ...]`.

Prints a line for each fault, and how many were found.
"""

import sys
import warnings
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from localinfer.apps.show.certificate import Certificate, certify, compare
from localinfer.errors import LocalinferError
from tests.models.checks.editable_model import EditableModel, base_model
from tests.models.checks.planted_faults import FAULTS, plant


@cache
def certified(base: str, folder: Path) -> Certificate:
    """The certificate of a whole model that faults are planted on, in which nothing differs from itself."""
    path = str(EditableModel.read(base_model(base)).write(folder / f"{base.replace(':', '-')}.gguf"))
    certificate = certify(path)
    assert compare(certificate, certify(path)) == [], base
    return certificate


def differences(certificate: Certificate, path: Path) -> list[str]:
    """Lines that a certificate gives of a file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return [one.message for one in compare(certificate, certify(str(path)))]
        except LocalinferError as error:
            return [str(error)]


def main(names: list[str]) -> None:
    """Plant faults, all without names, and print what is found."""
    num_found = 0
    with TemporaryDirectory() as folder:
        for name in names or FAULTS:
            found = differences(certified(FAULTS[name][0], Path(folder)), plant(name, Path(folder)))
            num_found += bool(found)
            print(f"{name}: {found[0] if found else 'NOT FOUND'}", flush=True)
    print(f"{num_found} of {len(names or FAULTS)} were found")


if __name__ == "__main__":
    main(sys.argv[1:])
