"""The file of `serve --models-config`, and which models `serve` finds; what is wrong is told with its line."""

import math
import threading
from pathlib import Path

import pytest

from localinfer.apps.cli.serve import ModelsOptions, find_sources, load_options_of, load_source, measure
from localinfer.apps.server.router.models import LoadThreads
from localinfer.errors import RequestError
from localinfer.models import demo
from localinfer.models.decoder.rope_options import RopeOptions
from localinfer.storage.hub.installed import InstalledModel

DEMO = Path(demo.__file__).parent / "demo-f16.gguf"
COMMAND_LINE = {
    "model": None,
    "context_length": None,
    "kv_type": "f16",
    "mmproj": "auto",
    "threads": 2,
    "draft": None,
    "chat_template": None,
    "rope": RopeOptions(scaling="linear", scale=2.0),
    "overrides": {"a": 1, "b": 2},
    "disk_cache": True,
    "speculation": "auto",
    "ignore_model_sampling": False,
    "template_variables": {"a": 1, "b": 2},
    "device": "auto",
    "tensor_split": None,
    "cpu_moe": None,
    "verify": True,
}
WHOLE = """
[defaults]
keep_alive = 60
kv-type = "q8_0"

[defaults.sampling]
temperature = 0.5

[models."pub/one"]
aliases = ["gpt-4o", "small"]
context_length = 512
chat_template = "one.jinja"
rope_scale = 4
set = ["b=3"]
chat_template_kwargs = ["b=3", "template_date=today"]
no_disk_cache = true
speculation = "off"
pinned = true
keep_alive = -1
sampling = {top_k = 7, temperature = 0}

[models.same]
model = "one"
context_length = 64

[models.other]
model = "elsewhere.gguf"
draft = "pub/one.gguf"
keep_alive = 0
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Models like the demo, whose weights are holes: they are measured and never loaded."""
    (tmp_path / "models" / "pub").mkdir(parents=True)
    for name in ("models/pub/one.gguf", "models/two.gguf", "models/pub/two.gguf", "elsewhere.gguf", "pub/one.gguf"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        with DEMO.open("rb") as source, (tmp_path / name).open("wb") as target:
            target.write(source.read(1 << 20))
            target.truncate(DEMO.stat().st_size)
    (tmp_path / "one.jinja").write_text("{{ messages[0].content }}")
    return tmp_path


def found(folder: Path, text: str, **options):
    (folder / "models.toml").write_text(text)
    chosen = ModelsOptions(**{"folder": str(folder / "models"), "config": str(folder / "models.toml"), **options})
    sources, preload = find_sources(None, chosen, COMMAND_LINE)
    assert preload == []
    return {source.id: source for source in sources}


def test_options_by_which_load_has_other_names_are_read(folder):
    """no_verify ended in AttributeError."""
    settings = 'n_cpu_moe = 3\nno_verify = true\ntensor_split = "3,1"\ndevice = "cuda:0,cuda:1"'
    models = found(folder, f"[models.two]\n{settings}\n[models.all]\nmodel = 'two'\ncpu_moe = true")
    options = load_options_of(models["two"], COMMAND_LINE)
    assert (options["cpu_moe"], options["verify"], options["tensor_split"]) == (3, False, [3.0, 1.0])
    assert options["device"] == "cuda:0,cuda:1"
    assert load_options_of(models["all"], COMMAND_LINE)["cpu_moe"] is True
    with pytest.raises(RequestError, match="n_cpu_moe is -1"):
        found(folder, "[models.two]\nn_cpu_moe = -1")


def test_each_model_has_its_own_settings_over_those_of_all(folder):
    models = found(folder, WHOLE)
    assert set(models) == {"two", "pub/one", "pub/two", "same", "other"}
    assert (models["same"].path, models["same"].settings.load["context_length"]) == (models["pub/one"].path, 64)
    one, other, two = models["pub/one"], models["other"], models["two"]
    assert one.aliases == ("gpt-4o", "small")
    assert (one.settings.is_pinned, one.settings.keep_alive_seconds) == (True, math.inf)
    assert one.settings.sampling == {"top_k": 7, "temperature": 0.0}
    options = load_options_of(one, COMMAND_LINE)
    assert options["model"] == str(folder / "models" / "pub" / "one.gguf")
    assert (options["context_length"], options["kv_type"], options["threads"]) == (512, "q8_0", 2)
    assert options["rope"] == RopeOptions(scaling="linear", scale=4.0)
    assert options["overrides"] == {"a": 1, "b": 3}
    assert options["template_variables"] == {"a": 1, "b": 3, "template_date": "today"}
    assert Path(options["chat_template"]) == folder / "one.jinja"
    assert (options["disk_cache"], options["speculation"]) == (False, "off")
    assert (two.aliases, two.settings.keep_alive_seconds, two.settings.is_pinned) == ((), 60, False)
    assert two.settings.load == {"kv_type": "q8_0"}
    assert two.settings.sampling == {"temperature": 0.5}
    assert (other.path, other.settings.keep_alive_seconds) == (folder / "elsewhere.gguf", 0)
    assert other.settings.load == {"kv_type": "q8_0", "draft": str(folder / "pub" / "one.gguf")}


def test_what_a_model_takes_counts_its_own_settings(folder):
    models = found(folder, '[models.two]\ncontext_length = 256\n[models.other]\nmodel = "elsewhere.gguf"\n')
    plain, short = (
        measure(models[name], {**COMMAND_LINE, "rope": RopeOptions(), "overrides": {}}) for name in ("other", "two")
    )
    assert (plain.context_length, short.context_length) == (1024, 1024)
    with_draft = found(folder, '[models.two]\ndraft = "elsewhere.gguf"\n')["two"]
    assert measure(with_draft, {**COMMAND_LINE, "rope": RopeOptions(), "overrides": {}}).fixed_bytes > plain.fixed_bytes


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("[model.a]", 1, "there is no setting 'model'; known: defaults, models"),
        ("models = 3", 1, "it is a table: write [models]"),
        ("[models]\ntwo = 3", 2, "it is a table: write [models.two]"),
        ('[models."pub/one"]\nthreads = 1\nctx = 5', 3, "there is no setting 'ctx' in [models.pub/one]; known: pinned"),
        ("[defaults]\naliases = ['a']", 2, "there is no setting 'aliases' in [defaults]"),
        ("[models.two]\n\ncontext_length = 0", 3, "context_length is 0: 0 is not in the range"),
        ("[models.two]\ncontext_length = 'many'", 2, "'many' is not a valid integer"),
        ("[models.two]\ncontext_length = true", 2, "context_length is True; wanted a text or a number"),
        ("[models.two]\nkv_type = 'q9'", 2, "q9"),
        ("[models.two]\nno_disk_cache = 1", 2, "no_disk_cache is 1; wanted true or false"),
        ("[models.two]\nset = ['x']", 2, "set is ['x']"),
        ("[models.two]\npinned = 'yes'", 2, "pinned is 'yes'; wanted true or false"),
        ("[models.two]\nkeep_alive = '5m'", 2, "keep_alive is '5m'; it must be a number"),
        ("[models.two]\nkeep_alive = -2", 2, "keep_alive is -2"),
        ("[models.two]\naliases = [3]", 2, "aliases is [3]; wanted names"),
        ("[models.two.sampling]\ntemp = 1", 2, "there is no setting 'temp' in [models.two.sampling]"),
        ("[models.two]\nsampling.top_k = -3", 2, "top_k is -3"),
        ("[models.two]\nchat_template = 'none.jinja'", 2, "there is no file"),
        ("[models.two]\ndraft = 'none.gguf'", 1, "none.gguf does not exist"),
        ("[models.three]\nthreads = 1", 1, "no model is called three: there are two, pub/one, pub/two"),
        ("[models.pub]\nthreads = 1", 1, "it may be any of pub/one, pub/two"),
        ("[models.new]\nmodel = 'none.gguf'", 1, "none.gguf does not exist"),
        ("[models.two", None, "is not TOML"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(folder, text, line, words):
    with pytest.raises(RequestError) as raised:
        found(folder, text)
    message = str(raised.value)
    place = str(folder / "models.toml") + (f", line {line}: " if line else " ")
    assert message.startswith(place), message
    assert words in message
    assert message.endswith("correct it, or leave out --models-config")


def test_pulled_models_are_served_beside_those_of_a_folder(folder, monkeypatch):
    def pulled(name: str, path: Path, problem: str = "") -> InstalledModel:
        return InstalledModel(name, None, 1, path, "localinfer", problem=problem)

    models = [
        pulled("org/repo:Q4_K_M", folder / "elsewhere.gguf"),
        pulled("org/twice:Q8_0", folder / "pub" / "one.gguf"),
        pulled("org/twice:Q4_0", folder / "models" / "two.gguf"),
        pulled("org/broken:Q8_0", folder / "gone.gguf", "it is damaged"),
    ]
    monkeypatch.setattr("localinfer.storage.hub.installed.find_pulled", lambda places: models)
    both = found(folder, "[models.repo]\npinned = true", pulled=True)
    assert list(both) == ["two", "pub/one", "pub/two", "org/repo:Q4_K_M", "org/twice:Q8_0"]
    assert both["org/repo:Q4_K_M"].aliases == ("org/repo",)
    assert both["org/repo:Q4_K_M"].settings.is_pinned
    assert both["org/twice:Q8_0"].aliases == ()
    alone, preload = find_sources(None, ModelsOptions(pulled=True), COMMAND_LINE)
    assert ([source.id for source in alone][:1], preload) == (["org/repo:Q4_K_M"], [])
    named, preload = find_sources(str(folder / "models" / "two.gguf"), ModelsOptions(pulled=True), COMMAND_LINE)
    assert ([source.id for source in named][:2], preload) == (["two", "org/repo:Q4_K_M"], ["two"])
    models.clear()
    with pytest.raises(RequestError, match="localinfer pull org/repo"):
        find_sources(None, ModelsOptions(pulled=True), COMMAND_LINE)
    found(folder, "", pulled=True)
    only, preload = find_sources(None, ModelsOptions(), COMMAND_LINE)
    assert ([source.path for source in only], preload) == ([DEMO], ["demo-f16"])


def test_a_model_is_loaded_in_the_background_beside_replies_and_answers_as_the_others_do():
    threads = LoadThreads()
    options = {**COMMAND_LINE, "rope": RopeOptions(), "overrides": {}, "disk_cache": False}
    [source], _ = find_sources(None, ModelsOptions(), options)
    threads.is_beside_replies = True
    stages: set[str] = set()
    priorities = []

    def note(stage: str, done: int, total: int) -> None:
        stages.add(stage)
        names = {thread.name for thread in threading.enumerate()}
        priorities.append("localinfer-0" in names)

    measured = {**options, "measure_again": True, "threads": 2}
    with load_source(source, measured, threads, note) as llm:
        llm.complete("Once", max_tokens=2)
        assert llm._model.pool.priority == "normal"
    # The pool of a model in the background has a thread in place of the caller's.
    assert any(priorities)
    assert not any(stage.startswith("measuring") for stage in stages)
