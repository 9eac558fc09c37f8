"""Settings in files of agents: only their values change, and --restore gives the former bytes."""

import json
import random
import tomllib
from pathlib import Path
from typing import Any

import pytest

from localinfer.apps.agents.settings_files import FileSettings, SettingsFiles
from localinfer.apps.agents.settings_text import KeyPath, SettingsFormat, settings_text
from localinfer.errors import RequestError

JSON_TEXTS = (
    "",
    "{}",
    "{}\n",
    '{"a": 1}',
    '{ "a": {"b": [1, 2]}, "lm": {"other": true} }\n',
    '\ufeff{\r\n\t"a": 1, // one\r\n\t"lm": {} /* none */\r\n}\r\n',
    '// mine\n{\n  "theme": "dark", // a { in a comment\n  "lm": {\n    "x": "}", /* , */\n  },\n} // end\n',
    '{\n    "model": "former",\n    "list": [1, /* two */ 2,],\n    "lm": {"x": {"y": null}}\n    // last\n}',
)
TOML_TEXTS = (
    "",
    "# only a comment",
    'model = "former" # kept\n',
    'x = """\n[lm]\nmodel = 3\n"""\nlist = [\n  1, # one\n]\n\n[lm.other]\nk = 1\n[[many]]\nn = "a"\n[[many]]\nn = 2',
    '[lm]\nurl = "#"\t# a comment\r\n[lm.local]\n"key" = { a = 1 }\n',
)
YAML_TEXTS = ("", "# none\n", "model: 'former' # kept\r\nlist:\n- a: 1\n", 'x:\n  model: inner\nurl: "a # b"')
VALUES: tuple[tuple[KeyPath, Any], ...] = (
    (("model",), 'a "b" \\ ü'),
    (("lm", "local", "url"), "http://127.0.0.1:8080/v1"),
    (("lm", "local", "models"), [{"id": "m", "n": 4, "x": {}}, True, 1.5]),
    (("lm", "local", "key"), {"a": {"b": "c"}}),
)
CASES: dict[SettingsFormat, tuple[tuple[str, ...], tuple[tuple[KeyPath, Any], ...]]] = {
    "json": (JSON_TEXTS, VALUES),
    "toml": (TOML_TEXTS, VALUES),
    "yaml": (YAML_TEXTS, ((("model",), 'a "b" ü'), (("url",), "x"), (("limit",), 4096), (("is_on",), True))),
}


def _read(form: SettingsFormat, text: str) -> Any:
    if form == "json":
        from localinfer.apps.agents.settings_text import _JsonReader

        return _JsonReader(text or "{}").document().value
    return tomllib.loads(text)


def test_values_stand_in_the_file_with_everything_else_and_can_be_taken_out_again(tmp_path: Path) -> None:
    for form, (texts, values) in CASES.items():
        for number, text in enumerate(texts):
            path, record = tmp_path / f"{form}{number}" / "settings", tmp_path / f"{form}{number}.json"
            path.parent.mkdir()
            path.write_bytes(text.encode())
            files = SettingsFiles(record)
            files.write([FileSettings(path, form, values)])
            written = path.read_bytes().decode()
            kept = [line for line in text.splitlines() if "//" in line or "#" in line]
            for line in kept:
                comment = line[line.index("//") if form == "json" else line.rindex("#") :]
                assert comment in written or '"' in comment, (form, text, comment)
            if form != "yaml":
                expected = _read(form, text)
                for keys, value in values:
                    table = expected
                    for key in keys[:-1]:
                        table = table.setdefault(key, {})
                    table[keys[-1]] = value
                assert _read(form, written) == expected, (form, text, written)
            for keys, value in values:
                edited = settings_text(written, form, "settings")
                assert edited.is_same(edited.find(keys) or "", edited.written(value)), (form, text, keys)
            # Again, as by a second start with other values, and back.
            files.write([FileSettings(path, form, values[:1])])
            files.write([FileSettings(path, form, values)])
            assert path.read_bytes().decode() == written, (form, text)
            assert any("bytes before" in line for line in files.restore()) and not files.is_written
            assert path.read_bytes() == text.encode(), (form, text)


def test_a_file_that_was_edited_since_keeps_what_its_user_changed(tmp_path: Path) -> None:
    edits = {
        "json": lambda text: text.replace("{", '{ "mine": [1], ', 1),
        "toml": lambda text: f'mine = "yes"\n{text}',
        "yaml": lambda text: f"mine: yes\n{text}",
    }
    for form, (texts, values) in CASES.items():
        for number, text in enumerate(texts):
            path, files = tmp_path / f"{form}{number}", SettingsFiles(tmp_path / f"{form}{number}.json")
            path.write_bytes(text.encode())
            files.write([FileSettings(path, form, values)])
            path.write_bytes(edits[form](path.read_bytes().decode()).encode())
            (line,) = files.restore()
            assert "only our values" in line, (form, text)
            left = path.read_bytes().decode()
            assert "mine" in left
            for keys, value in values:
                found = settings_text(left, form, "settings")
                assert found.find(keys) != found.written(value), (form, text, keys, left)
            if form != "yaml":
                expected = _read(form, text)
                expected = {"mine": [1] if form == "json" else "yes", **expected}
                assert _read(form, left) == expected, (form, text, left)
            elif text.endswith("\n"):
                assert left.replace("mine: yes\n", "") == text, (text, left)


def test_a_value_that_its_user_changed_stays_and_is_named(tmp_path: Path) -> None:
    path, files = tmp_path / "deep" / "er" / "settings.json", SettingsFiles(tmp_path / "record.json")
    files.write([FileSettings(path, "json", VALUES)])
    path.write_text(path.read_text().replace("8080", "9090"))
    (line,) = files.restore()
    assert "lm.local.url, which you changed, stays" in line
    assert json.loads(path.read_text()) == {"lm": {"local": {"url": "http://127.0.0.1:9090/v1"}}}
    path.unlink()
    files.write([FileSettings(path, "json", VALUES)])
    (line,) = files.restore()
    assert "deleted" in line and not path.exists()
    # Folders that were not there go too.
    (tmp_path / "deep" / "er").rmdir()
    (tmp_path / "deep").rmdir()
    files.write([FileSettings(path, "json", VALUES)])
    files.restore()
    assert not (tmp_path / "deep").exists()


def test_files_that_cannot_be_changed_without_loss_are_left_and_named(tmp_path: Path) -> None:
    refused: tuple[tuple[SettingsFormat, str], ...] = (
        ("json", "[1]"),
        ("json", '{"lm": 3}'),
        ("json", '{"a": 1,,}'),
        ("json", '{"a": 1, "a": 2}'),
        ("toml", "lm = 3"),
        ("toml", "a ="),
        ("toml", 'lm = { local = { url = "x" } }'),
        ("toml", 'lm.local.url = "x"'),
        ("yaml", '{"model": 1}'),
        ("yaml", "model:\n  inner: 1\n"),
        ("yaml", "model: a\n---\nmodel: b\n---\n"),
    )
    for form, text in refused:
        path, whole, files = tmp_path / "settings", tmp_path / "whole", SettingsFiles(tmp_path / "record.json")
        path.write_text(text)
        whole.write_text("")
        with pytest.raises(RequestError, match=r"settings: .*--print"):
            files.write([FileSettings(whole, "json", VALUES), FileSettings(path, form, CASES[form][1])])
        assert path.read_text() == text and not whole.read_text() and not files.is_written


def test_random_edits_leave_what_json_holds_elsewhere() -> None:
    chosen = random.Random(5)

    def made(depth: int) -> Any:
        if depth == 0 or chosen.random() < 0.3:
            return chosen.choice((1, "a, } // b", None, [], [1, {"a": 2}], {}))
        return {chosen.choice("abcd"): made(depth - 1) for _ in range(chosen.randrange(4))}

    for _ in range(300):
        value = {"r": made(3), "a": made(2)}
        text = json.dumps(value, indent=chosen.choice((None, 1, 4, "\t")))
        edited = settings_text(text, "json", "f")
        keys = tuple(chosen.choice("abcdr") for _ in range(chosen.randrange(1, 4)))
        depth, former = edited.depth(keys), edited.find(keys)
        try:
            edited.put(keys, edited.written({"x": [1]}))
        except RequestError:
            continue
        table: Any = json.loads(text)
        for key in keys[:-1]:
            table = table.setdefault(key, {})
        table[keys[-1]] = {"x": [1]}
        inner: Any = json.loads(edited.text)
        for key in keys[:-1]:
            inner = inner[key]
        assert inner == table
        if former is None:
            edited.drop(keys, depth)
        else:
            edited.put(keys, former)
        assert json.loads(edited.text) == value, (text, keys)
