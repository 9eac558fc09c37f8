"""`localinfer bench ablation`: each optimisation alone and all but each, as a table and a chart."""

import itertools
import json
from dataclasses import asdict
from pathlib import Path

import pytest

from localinfer.apps.bench import ablation
from localinfer.apps.bench.charts import ablation_figure, save_figure
from localinfer.apps.bench.decode import BenchSettings
from localinfer.apps.bench.report import render_ablation
from localinfer.apps.cli import main
from localinfer.loading.options import model_path

DEMO = model_path(None)

FIGURES = dict.fromkeys(
    ("first_token_seconds", "next_turn_seconds", "restart_seconds", "decode_tokens_per_second"), 0.25
) | {"throughput_tokens_per_second": 900.0, "stall_seconds": 0.02, "peak_memory_bytes": 4_000_000, "divergence": 0.0075}


def test_an_ablation_has_each_optimisation_alone_and_all_but_each():
    rows = list(ablation.configurations())
    num = len(ablation.OPTIMISATIONS)
    assert [sum(asdict(one).values()) for _, one in rows] == [*range(num + 1), *[num - 1] * num]
    # The row before the last one that is switched on is that which it alone is left out of.
    assert rows[num][1] == ablation.WHOLE and rows[-1][1] == rows[num - 1][1]
    assert len(dict(rows)) == len(rows) == len({one for _, one in rows}) + 1
    for index, name in enumerate(ablation.OPTIMISATIONS):
        assert asdict(rows[1 + index][1]) == asdict(rows[index][1]) | {name: True}
        assert asdict(rows[num + 1 + index][1]) == asdict(ablation.WHOLE) | {name: False}


@pytest.mark.parametrize("configuration", [ablation.NONE, ablation.WHOLE], ids=["none", "whole"])
def test_a_configuration_is_measured_with_what_it_says(configuration, monkeypatch):
    from localinfer.loading import load as loading

    loaded = []
    load = loading.load
    monkeypatch.setattr(loading, "load", lambda *model, **options: loaded.append(options) or load(*model, **options))
    settings = BenchSettings(model=str(DEMO), prompt=24, decode=6, threads=2)
    found = ablation.measure(configuration, settings)
    assert found.keys() == FIGURES.keys() - {"divergence"} and all(value > 0 for value in found.values())
    for options in loaded:
        assert (options["threads"], options["kv_type"]) == ((2, "q8_0") if configuration.threads else (1, "f16"))
        assert options["disk_cache"] is configuration.disk_cache
        assert options["speculation"] == ("auto" if configuration.drafts else None)
        assert options["limits"].max_running == (16 if configuration.batching else 1)
    assert len(loaded) == 2


def test_an_ablation_as_a_table_and_a_chart(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(
        ablation, "_in_a_process", lambda *_: {key: FIGURES[key] for key in FIGURES if key != "divergence"}
    )
    monkeypatch.setattr(
        ablation, "_divergences", lambda files, _: dict.fromkeys(itertools.product((0, 1), (0, 1)), 0.0075)
    )
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "ablation", "--prompt", "9", "--decode", "4", "--repetitions", "2", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [row["figures"] for row in record["rows"]] == [FIGURES] * 17
    assert [len(row["samples"]) for row in record["rows"]] == [2] * 17
    table = render_ablation(record).splitlines()
    assert len([line for line in table if line.endswith("7.50")]) == 17
    assert any(line.startswith("all but chunked prefill ") for line in table)
    pytest.importorskip("matplotlib")
    save_figure(ablation_figure(record), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_an_ablation_takes_the_file_and_makes_the_other(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(
        "localinfer.apps.quantize.quantize", lambda model, path, **more: made.append((model, more["type"]))
    )
    for types, kind, is_quantized in (({"F16", "F32"}, "Q4_K_M", False), ({"Q4_K", "F32"}, "F16", True)):
        found = ablation._two_files("model.gguf", types, tmp_path, lambda *_: None)
        assert found == {is_quantized: "model.gguf", not is_quantized: str(tmp_path / "made.gguf")}
        assert made.pop() == ("model.gguf", kind)
    shipped = ablation._two_files(str(DEMO), {"F16"}, tmp_path, lambda *_: None)
    assert [Path(path).name for path in shipped.values()] == ["demo-f16.gguf", "demo-q4_k_m.gguf"] and not made
