"""Sampling that a model's file recommends: read under GGUF's names, checked, and warned of where it makes no sense."""

import pytest

import localinfer
from localinfer.apps.show.describe import describe_file, render_text
from localinfer.engine.sampling.params import file_sampling
from localinfer.errors import RequestError
from tests.support.checkpoint_files import llama_weights, write_folder

RECOMMENDED = {
    "general.sampling.temp": 0.6000000238418579,
    "general.sampling.top_k": 20,
    "general.sampling.penalty_repeat": 1.05,
    "general.sampling.penalty_last_n": -1,
}


def test_names_of_files_are_those_of_options():
    metadata = {**RECOMMENDED, "general.name": "x", "general.sampling.sequence": "penalties;top_k"}
    wanted = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05, "repetition_last_n": -1}
    assert file_sampling(metadata, name="x") == wanted
    assert file_sampling({"general.sampling.top_k": -1.0}, name="x") == {"top_k": 0}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("top_p", 7.0), ("temp", "hot"), ("temp", 10**400), ("top_k", 1.5)),
        *(("mirostat", 1), ("min_p", True), ("magic", 1)),
    ],
)
def test_value_without_a_meaning_is_left_out_with_a_warning(caplog, key, value):
    metadata = {f"general.sampling.{key}": value, "general.sampling.xtc_probability": 0.5}
    assert file_sampling(metadata, name="a.gguf") == {"xtc_probability": 0.5}
    (record,) = caplog.records
    assert "a.gguf" in record.message


def test_folder_recommends_what_its_generation_config_says(tmp_path):
    for number, (settings, wanted) in enumerate(
        (
            ({"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}, ["temp", "top_k", "top_p"]),
            ({"temperature": 0.7, "max_new_tokens": 9, "min_p": None, "top_p": "0.9"}, ["temp"]),
            ({"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.1}, ["penalty_repeat"]),
        )
    ):
        folder = write_folder(tmp_path / str(number), llama_weights(), generation_config=settings)
        description = describe_file(str(folder))
        found = [key for key in description.metadata if key.startswith("general.sampling.")]
        assert sorted(found) == sorted(f"general.sampling.{key}" for key in wanted)
        assert ("temperature" in description.sampling) is ("temp" in wanted)
        assert "sampling" in render_text(description, tensors=False).partition("tensor types")[0]


def test_defaults_hold_where_a_generation_says_nothing():
    with localinfer.load(threads=1, context_length=256, overrides=RECOMMENDED) as llm:
        assert llm.info.sampling == llm.recommended_sampling == file_sampling(RECOMMENDED, name="x")
        assert llm.defaults == {}
        hot = {"temperature": 1.5, "seed": 5, "max_tokens": 12}
        free = llm.complete("Once", **hot).text
        llm.set_defaults(top_k=1, max_tokens=4)
        assert llm.complete("Once").text == llm.complete("Once", temperature=0).text
        assert llm.complete("Once", **hot, top_k=40).text == free
        assert llm.complete("Once").stats.completion_tokens == 4
        greedy = llm.chat([{"role": "user", "content": "Hi"}], temperature=0, max_tokens=4).text
        assert llm.chat([{"role": "user", "content": "Hi"}]).text == greedy
        assert llm.session().ask("Hi").text == greedy
        for wrong in ({"top_k": -1}, {"magic": 1}, {"thinking": 1}, {"tools": []}):
            with pytest.raises(RequestError):
                llm.set_defaults(**wrong)
        assert llm.defaults["top_k"] == 1
