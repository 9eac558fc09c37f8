"""The README's table of llama-server's options names options that exist."""

import re
from pathlib import Path

import localinfer.apps.server
from localinfer.apps.cli.serve import serve_command

README = Path(localinfer.apps.server.__file__).with_name("llama_server") / "README.md"


def test_every_option_that_is_named_in_place_of_llama_servers_exists():
    lines = README.read_text(encoding="utf-8").splitlines()
    start = lines.index("| llama-server | `localinfer serve` |")
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    known = {name for parameter in serve_command.params for name in parameter.opts}
    assert len(rows) > 20
    for theirs, ours in rows:
        named = re.findall(r"(?<![\w-])--?[a-z][\w-]*", theirs if ours.startswith("the same") else ours)
        assert ours.startswith(("missing", "members")) or named, ours
        if not ours.startswith(("missing", "members")):
            assert set(named) <= known, set(named) - known
