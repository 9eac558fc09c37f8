"""What is said of systems: the workflow runs what the README tells people to, and says that it has never run."""

import re
import tomllib

from tests.support.documents import REPOSITORY

WORKFLOW = (REPOSITORY / ".github" / "workflows" / "platforms.yml").read_text(encoding="utf-8")
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
SYSTEMS = {"Linux": "ubuntu-24.04", "macOS": "macos-15", "Windows": "windows-2025"}


def test_the_workflow_is_short_and_says_first_that_it_has_never_run() -> None:
    lines = WORKFLOW.splitlines()
    assert len(lines) < 80
    assert "has never run" in "".join(line for line in lines[:4] if line.startswith("#"))
    assert "has never run" in README.partition("## Platforms")[2].partition("\n## ")[0]


def test_the_workflow_runs_the_commands_of_the_readme() -> None:
    (start, tests) = re.findall(r"```sh\n(python3 -m venv .*)\n```", README)
    for command in (start, *tests.split(" && ")[1:]):
        wanted = re.sub(r"^python3 ", "python ", command).replace(".venv/bin/", "$BIN/")
        assert wanted in WORKFLOW
    paths = re.findall(r"tests/[\w/]+\.py", WORKFLOW)
    modules = [f"{name.replace('.', '/')}.py" for name in re.findall(r"python -m (tests[\w.]+)", WORKFLOW)]
    assert len(paths) > 1 and modules and all((REPOSITORY / name).is_file() for name in paths + modules)


def test_systems_are_the_same_in_the_workflow_the_table_and_the_classifiers() -> None:
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        classifiers = tomllib.load(file)["project"]["classifiers"]
    named = {one.split(" :: ")[-1].lower() for one in classifiers if one.startswith("Operating System")}
    assert named == {name.lower() for name in SYSTEMS}
    assert all(f"| {name} |" in README and f"system: {machine}," in WORKFLOW for name, machine in SYSTEMS.items())
    assert "system: ubuntu-24.04-arm," in WORKFLOW
