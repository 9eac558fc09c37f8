"""Installed packages: every folder of code is a package, listed by name, and nothing else comes along."""

import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import localinfer
from localinfer.kernels.cuda.kernel_cache import NEWER_VERSIONS, OLDEST_VERSIONS
from localinfer.system.extras import EXTRAS, OPTIONAL
from tests.bench.cuda_requirements import refused_versions, version_problem, wanted_versions
from tests.support.limits import seconds

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDERS = ("localinfer", "kernels", "models", "quant")
CORE = {"numpy", "numba", "llvmlite", "tokenizers", "jinja2", "platformdirs", "psutil"}
"""Packages that load, complete and chat."""


@pytest.fixture(scope="module")
def settings() -> dict[str, Any]:
    return tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))


def package_folders() -> dict[str, str]:
    """Package name -> folder, for every folder that holds a module."""
    found = {}
    for top in FOLDERS:
        for module in (REPOSITORY / top).rglob("*.py"):
            folder = module.parent.relative_to(REPOSITORY).as_posix()
            dotted = folder.replace("/", ".")
            found[dotted if top == "localinfer" else f"localinfer.{dotted}"] = folder
    return found


def test_every_folder_of_modules_is_a_listed_package(settings):
    assert dict(settings["tool"]["setuptools"]["package-dir"]) == package_folders()
    assert sorted(settings["tool"]["setuptools"]["packages"]) == sorted(package_folders())


def test_every_package_is_a_regular_one():
    missing = [folder for folder in package_folders().values() if not (REPOSITORY / folder / "__init__.py").is_file()]
    assert missing == []


CONTAINERS = {
    "localinfer": "localinfer",
    "localinfer.kernels": "kernels",
    "localinfer.models": "models",
    "localinfer.quant": "quant",
    "localinfer.apps": "localinfer/apps",
    "localinfer.apps.server": "localinfer/apps/server",
}


@pytest.mark.parametrize("container", CONTAINERS)
def test_import_contracts_place_every_module_and_package(settings, container):
    contracts = settings["tool"]["importlinter"]["contracts"]
    (contract,) = (contract for contract in contracts if contract.get("containers") == [container])
    assert contract["exhaustive"]
    placed = {name.strip() for layer in contract["layers"] for name in re.split("[|:]", layer)}
    folder = REPOSITORY / CONTAINERS[container]
    found = {path.stem for path in folder.glob("*.py")} | {path.parent.name for path in folder.glob("*/__init__.py")}
    if container == "localinfer":
        found |= {"kernels", "models", "quant"}
    assert placed == found - {"__init__"}


def test_the_order_within_a_row_of_the_contract_is_said_by_another(settings):
    whole, *others = settings["tool"]["importlinter"]["contracts"]
    assert whole["containers"] == ["localinfer"]
    ordered = [
        {name.strip() for layer in one["layers"] for name in layer.split("|")}
        for one in others
        if one["type"] == "layers" and "containers" not in one
    ]
    for row in whole["layers"]:
        members = {f"localinfer.{name.strip()}" for name in row.split(":")}
        assert len(members) == 1 or members in ordered, row


def test_extras_are_the_documented_ones(settings):
    assert set(settings["project"]["optional-dependencies"]) == {
        *EXTRAS,
        *OPTIONAL,
        "bench",
        "cuda",
        "dev",
        "docs",
        "plot",
        "zstd",
    }


def test_parts_are_installed_by_default_and_by_their_own_names(settings):
    """Beside the core every dependency belongs to a part, and each part lists what its code requires."""
    project = settings["project"]
    extras = {name: project["optional-dependencies"][name] for name in EXTRAS}
    parts = {line for lines in extras.values() for line in lines}
    assert set(project["dependencies"]) == parts | {line for line in project["dependencies"] if named(line) in CORE}
    assert {named(line) for line in project["dependencies"]} == {named(line) for line in parts} | CORE
    for name, lines in extras.items():
        assert tuple(named(line).replace("-", "_") for line in lines) == EXTRAS[name]


def every_requirement(settings: dict[str, Any]) -> list[Requirement]:
    project = settings["project"]
    lines = [*settings["build-system"]["requires"], *project["dependencies"]]
    lines += [line for extra in project["optional-dependencies"].values() for line in extra]
    return [Requirement(line) for line in lines]


def test_every_requirement_has_a_lowest_and_a_highest_version(settings):
    """A new major version of anything is tried before anyone gets it; a lowest one is what `.ci/run --lowest` tries."""
    found = every_requirement(settings)
    assert [str(one) for one in found if sorted(bound.operator for bound in one.specifier) != ["<", ">="]] == []
    for one in found:
        low, high = (Version(bound.version) for bound in sorted(one.specifier, key=lambda bound: bound.operator)[::-1])
        assert low < high, one


def test_the_lowest_versions_are_those_of_the_bounds(settings):
    done = subprocess.run(
        [sys.executable, REPOSITORY / ".ci" / "lowest.py", "dev", "cuda"],
        capture_output=True,
        text=True,
        timeout=seconds(15),
        check=True,
    )
    constraints = [Requirement(line) for line in done.stdout.splitlines()]
    found = {one.name: one.specifier for one in constraints}
    assert len(found) == len(constraints)
    project = settings["project"]
    extras = [line for name in ("dev", "cuda") for line in project["optional-dependencies"][name]]
    wanted = [Requirement(line) for line in [*project["dependencies"], *extras]]
    assert found.keys() == {canonicalize_name(one.name) for one in wanted}
    for one in wanted:
        (exact,) = found[canonicalize_name(one.name)]
        assert exact.operator == "==" and one.specifier.contains(exact.version), one


def test_a_package_has_the_same_bounds_wherever_it_is_wanted(settings):
    bounds: dict[str, set[str]] = {}
    for one in every_requirement(settings):
        bounds.setdefault(canonicalize_name(one.name), set()).add(str(one.specifier))
    # What compiles CUDA kernels fails with NumPy 2.5, which all else takes.
    assert {name: found for name, found in bounds.items() if len(found) > 1} == {"numpy": {"<3,>=1.26", "<2.5,>=1.26"}}


def test_what_is_tried_here_is_within_the_bounds(settings):
    """An install of `.[dev]` has nothing that the bounds exclude."""
    wrong = []
    for one in every_requirement(settings):
        try:
            here = version(one.name)
        except PackageNotFoundError:
            continue
        if not one.specifier.contains(here, prereleases=True):
            wrong.append(f"{one} but {here} is installed")
    assert wrong == []


def named(requirement: str) -> str:
    """The distribution of a requirement."""
    return re.split("[><=]", requirement)[0]


def test_command_runs_the_documented_entry_point(settings):
    """The one that answers Ctrl-C while everything else is still imported."""
    assert settings["project"]["scripts"] == {"localinfer": "localinfer.__main__:main"}
    assert callable(import_module("localinfer.__main__").main)


def test_core_install_needs_no_torch():
    core = [line for line in requires("localinfer") or [] if "extra ==" not in line]
    assert core
    assert not [line for line in core if "torch" in line]


def test_public_names_are_the_documented_ones():
    assert set(localinfer.__all__) == {
        *("LLM", "CompactionStats", "Completion", "load", "load_tokenizer", "errors"),
        *("JsonObject", "JsonSchema", "Regex", "Grammar", "StructuralTag"),
        *("RopeOptions", "EngineLimits", "ProgressCallback", "GenerationOptions", "ChatOptions", "ReplyOptions"),
        *("Prompt", "Constraint", "ToolChoice", "Tokenizer", "availability", "Availability", "ModelInfo"),
        *("TextStream", "StreamEvent", "Stats", "ToolCall", "ToolCallDelta", "TokenLogprobs"),
        *("Beam", "BeamCompletion", "RankedDocument", "SnapshotStats"),
        *("KVEventPublisher", "KVEventsConfig", "block_hashes"),
        *("aload", "WarmUp", "freeze_support", "report_crashes", "set_cache_folder", "warm_up"),
        *("Choice", "ChoiceAnswer", "Score", "ScoreAnswer", "YesNo", "YesNoAnswer"),
        *("DecisionCalibration", "DecisionOptions", "Decisions"),
        *("Session", "SessionOptions", "RequestedCall", "CallOutcome", "Tool"),
    }
    assert dir(localinfer) == sorted(localinfer.__all__)
    for name in localinfer.__all__:
        assert getattr(localinfer, name) is not None


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = localinfer.nonsense


def test_type_hints_are_announced():
    assert (Path(localinfer.__file__).parent / "py.typed").is_file()


def test_import_is_silent_and_loads_no_compiler():
    program = "import sys, localinfer; sys.exit('numba' in sys.modules or 'numpy' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, timeout=seconds(15), check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")


def test_gpu_libraries_are_wanted_in_the_versions_that_are_checked_at_a_start():
    assert wanted_versions().items() >= OLDEST_VERSIONS.items()
    assert refused_versions().items() >= NEWER_VERSIONS.items()
    assert version_problem("pytest", (1,)) is None
    assert version_problem("pytest", (999, 1)) == f"pytest {version('pytest')} is installed; 999.1 or newer is wanted"
    assert version_problem("pytest", (1,), (2,)) == f"pytest {version('pytest')} is installed; one before 2 is wanted"
    assert version_problem("no-such-package", (1, 2)) == "no-such-package is not installed; 1.2 or newer is wanted"
