"""Certificates of models: every planted fault shows, and nothing shows of a whole one."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import localinfer
from localinfer.apps.cli import main
from localinfer.apps.show.certificate import (
    NUM_PROBES,
    Certificate,
    ReadDigests,
    certify,
    certify_file,
    certify_outputs,
    compare,
)
from localinfer.errors import RequestError
from localinfer.models import demo
from localinfer.models.checks.tensor_scan import check_tensors
from localinfer.models.load.loader import open_model_file
from localinfer.quant.checkpoint import model_file
from localinfer.quant.checkpoint.model_file import read_stretch
from tests.models.checks.certified_faults import certified, differences
from tests.models.checks.planted_faults import FAULTS, plant
from tests.support.checkpoint_files import LLAMA_CONFIG, MODULES, llama_weights, tokenizer_document, write_folder
from tests.support.quantized_checkpoints import gptq_tensors, in_module, random_codes

DEMO = str(Path(demo.__file__).parent / "demo-f16.gguf")
SOME = sorted(FAULTS)[::8]
"""An eighth of the faults, of which `python -m tests.models.checks.certified_faults` tries all."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("certified")


@pytest.mark.parametrize("fault", SOME)
def test_planted_faults_show(fault: str, folder: Path, tmp_path: Path) -> None:
    certificate = certified(FAULTS[fault][0], folder)
    assert compare(certificate, certificate) == []
    found = differences(certificate, plant(fault, tmp_path))
    assert found and all("\n" not in line for line in found)


def test_codes_of_a_quantized_folder_are_certified(tmp_path: Path) -> None:
    module = "model.layers.0.self_attn.q_proj"
    codes = random_codes(np.random.default_rng(1), MODULES["self_attn.q_proj"])
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}

    def written(name: str) -> Path:
        weights = {**llama_weights(), **in_module(module, gptq_tensors(codes))}
        del weights[f"{module}.weight"]
        config = {**LLAMA_CONFIG, "quantization_config": settings}
        return write_folder(tmp_path / name, weights, config, tokenizer=tokenizer_document())

    whole = certify(str(written("whole")))
    assert compare(whole, certify(str(written("again")))) == []
    codes.codes[3, 5] ^= 1
    told = [one.message for one in compare(whole, certify(str(written("changed"))))]
    assert "tensor blk.0.attn_q.weight differs" in told[0] and "other logits" in told[1]


def test_what_the_checks_of_weights_read_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    file = open_model_file(DEMO)
    wanted, read, again = certify_file(file), ReadDigests(file), list[str]()
    assert list(check_tensors(file, take=read.take)) == []
    monkeypatch.setattr(model_file, "read_stretch", lambda file, name, *_: again.append(name))
    assert certify_file(file, known=read.whole()) == wanted and again == []
    read.take("output_norm.weight", np.zeros(4, np.uint8))
    assert "output_norm.weight" not in read.whole(), "its bytes are not those of one reading"
    file.close()


def test_the_report_names_what_differs() -> None:
    whole = certify(DEMO)
    assert len(whole.outputs) == len(whole.texts) == NUM_PROBES and len(set(whole.outputs)) > NUM_PROBES // 2
    tensors = {**whole.tensors, "blk.0.attn_q.weight": "other", "new.weight": "x"}
    del tensors["output_norm.weight"]
    settings = {**whole.settings, "llama.context_length": "other"}
    outputs = [*whole.outputs[:3], "other", *whole.outputs[4:]]
    changed = replace(whole, tensors=tensors, settings=settings, outputs=outputs, texts=["other", *whole.texts[1:]])
    told = " ".join(one.message for one in compare(whole, changed))
    for words in (
        "blk.0.attn_q.weight",
        "new.weight",
        "output_norm.weight",
        "llama.context_length",
        "probe 1 of",
        "probe 4 of",
    ):
        assert words in told
    (machine,) = compare(whole, replace(whole, outputs=outputs))
    assert "this machine or version" in machine.message
    assert "keys of the last layer with attention, which are the same" in machine.message
    layers = [*whole.layers[:2], "other", *whole.layers[3:]]
    (machine,) = compare(whole, replace(whole, outputs=outputs, layers=layers))
    assert f"keys of layer 3 of {len(layers)} with attention" in machine.message
    (older,) = compare(replace(whole, layers=()), replace(whole, outputs=outputs))
    assert "keys of" not in older.message
    (other,) = compare(whole, replace(whole, outputs=outputs, computed={"kv_type": "q8_0"}))
    assert "cannot be compared" in other.message


def test_the_first_layer_that_computes_otherwise_is_told(tmp_path: Path) -> None:
    """Keys of a layer depend on the layers before it, and on its own."""
    whole = certify(DEMO)
    assert len(set(whole.layers)) == len(whole.layers) > 3
    with localinfer.load(DEMO, threads=2, disk_cache=False) as llm:
        llm.logits([1, 2, 3])
        assert certify_outputs(Certificate(model="x"), llm).layers == whole.layers
    blob = bytearray(Path(DEMO).read_bytes())
    first = blob.find(beginning_of(DEMO, "blk.2.ffn_down.weight"))
    blob[first + 1] ^= 0x40
    changed = tmp_path / "changed.gguf"
    changed.write_bytes(blob)
    found = certify(str(changed))
    same = [one == other for one, other in zip(whole.layers, found.layers, strict=True)]
    assert same[:3] == [True] * 3 and not any(same[3:])


def beginning_of(path: str, name: str) -> bytes:
    """The first bytes of a tensor, enough to find it by."""
    file = open_model_file(path)
    try:
        return np.array(read_stretch(file, name, 0, 256)).tobytes()
    finally:
        file.close()


def test_a_certificate_is_a_file_that_commands_write_and_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "demo.cert"
    assert main(["certify", DEMO, "-o", str(file)]) == 0
    assert f"{NUM_PROBES} probes" in capsys.readouterr().out
    assert Certificate.read(file) == certify(DEMO)
    broken = plant("layer twice", tmp_path)
    for words in (["show"], ["show", "--verify"]):
        assert main([*words, DEMO, "--certificate", str(file)]) == 0
        assert "nothing wrong" in capsys.readouterr().out
        assert main([*words, str(broken), "--certificate", str(file)]) == 1
        assert "certificate: tensor blk." in capsys.readouterr().out
    for content, words in (
        (b"{", "no certificate"),
        (b"[]", "no certificate"),
        (b'{"format": 1, "outputs": [], "strange": 1}', "no certificate"),
        (b'{"format": 9, "outputs": []}', "of version 9"),
    ):
        file.write_bytes(content)
        with pytest.raises(RequestError, match=words):
            Certificate.read(file)
    with pytest.raises(RequestError, match="cannot be read"):
        Certificate.read(tmp_path / "none")
