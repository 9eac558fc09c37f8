"""Which of a repository's files are pulled."""

import pytest

from localinfer.errors import RequestError
from localinfer.storage.hub.variants import (
    Reference,
    StoredFile,
    choose_variant,
    encoders_for,
    find_variants,
    is_safe_path,
    parse_reference,
    quant_of,
)


def chosen(quant: str | None, *paths: str) -> list[str]:
    files = [StoredFile(path, 1000 + len(path)) for path in paths]
    return [file.path for file in choose_variant(Reference("org/repo", quant), files).files]


@pytest.mark.parametrize(
    ("path", "quant"),
    [
        ("Qwen2.5-7B-Instruct-Q4_K_M.gguf", "Q4_K_M"),
        ("qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf", "Q4_K_M"),
        ("UD-Q4_K_XL/M-UD-Q4_K_XL-00001-of-00002.gguf", "UD-Q4_K_XL"),
        ("model.IQ3_XXS.gguf", "IQ3_XXS"),
        ("BF16/model-00001-of-00003.gguf", "BF16"),
        ("model-fp16.gguf", "F16"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("bitnet-TQ2_0.gguf", "TQ2_0"),
        ("model-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("Qwen3-4B.gguf", None),
        ("Q4x-model.gguf", None),
    ],
)
def test_quantizations_are_read_from_names(path, quant):
    assert quant_of(path) == quant


@pytest.mark.parametrize(
    ("quants", "preferred"),
    [
        ("Q2_K Q4_K_M Q8_0", "Q4_K_M"),
        ("Q2_K Q4_K_S Q5_K_M", "Q4_K_S"),
        ("Q8_0 UD-Q4_K_XL F16", "UD-Q4_K_XL"),
        ("Q5_K_M Q4_0 Q8_0", "Q4_0"),
        ("Q8_0 Q3_K_M F16", "Q8_0"),
        ("F16", "F16"),
    ],
)
def test_four_bits_are_preferred_then_what_is_near(quants, preferred):
    assert chosen(None, *(f"m-{quant}.gguf" for quant in quants.split())) == [f"m-{preferred}.gguf"]


def test_without_a_preferred_one_several_are_refused_with_sizes():
    with pytest.raises(RequestError, match=r"it has F16 \(1\.0 kB\), BF16 \(1\.0 kB\), F32"):
        chosen(None, "m-F16.gguf", "mm-BF16.gguf", "mmm-F32.gguf")


def test_two_files_of_one_quantization_are_named_by_their_files():
    paths = ["chat-Q4_K_M.gguf", "base-Q4_K_M.gguf"]
    for quant in (None, "q4_k_m"):
        with pytest.raises(RequestError, match="chat-Q4_K_M .*base-Q4_K_M|base-Q4_K_M .*chat-Q4_K_M"):
            chosen(quant, *paths)
    assert chosen("chat-q4_k_m", *paths) == chosen("chat-Q4_K_M.gguf", *paths) == ["chat-Q4_K_M.gguf"]


def test_a_quantization_is_found_in_any_case_and_without_its_prefix():
    assert chosen("q8_0", "m-Q8_0.gguf", "m-Q4_0.gguf") == ["m-Q8_0.gguf"]
    assert chosen("Q4_K_XL", "m-UD-Q4_K_XL.gguf", "m-Q4_K_M.gguf") == ["m-UD-Q4_K_XL.gguf"]
    assert chosen("Q4_K_XL", "m-UD-Q4_K_XL.gguf", "m-Q4_K_XL.gguf") == ["m-Q4_K_XL.gguf"]


def test_projectors_and_importance_matrices_are_no_models():
    assert chosen(None, "mmproj-Q4_K_M.gguf", "imatrix-Q4_K_M.gguf", "m-Q8_0.gguf") == ["m-Q8_0.gguf"]
    with pytest.raises(RequestError, match="projectors or importance matrices only"):
        chosen(None, "mmproj-F16.gguf")


@pytest.mark.parametrize(
    ("model", "others", "expected"),
    [
        ("m-Q4_0.gguf", ["mmproj-m-Q8_0.gguf", "mmproj-m-f16.gguf", "mmproj-m-F32.gguf"], "mmproj-m-f16.gguf"),
        ("m-Q4_0.gguf", ["mmproj-m-F32.gguf", "mmproj-m-bf16.gguf"], "mmproj-m-bf16.gguf"),
        ("a/m-Q4_0.gguf", ["b/mmproj-F16.gguf", "a/mmproj-Q8_0.gguf", "mmproj-F16.gguf"], "a/mmproj-Q8_0.gguf"),
        ("a/m-Q4_0.gguf", ["b/mmproj-F16.gguf", "mmproj.gguf"], "mmproj.gguf"),
        ("m-Q4_0.gguf", ["b/mmproj-F16.gguf", "mmproj.txt"], None),
    ],
)
def test_encoders_are_those_beside_the_model(model, others, expected):
    files = [StoredFile(path, 10) for path in (model, *others)]
    (variant,) = find_variants(files)
    found = encoders_for(variant, files)
    assert (None if found is None else found.path) == expected


def test_folders_come_without_pickles_and_second_copies():
    paths = ["config.json", "model.safetensors", "consolidated.safetensors", "pytorch_model.bin", "onnx/config.json"]
    folder = chosen(None, *paths, "merges.txt", "1_Pooling/config.json", "notes.txt")
    assert sorted(folder) == ["1_Pooling/config.json", "config.json", "merges.txt", "model.safetensors"]
    assert folder[-1] == "model.safetensors", "what makes it a model comes last"
    assert chosen(None, *paths, "m-Q4_0.gguf") == ["m-Q4_0.gguf"], "quantized files are preferred"
    with pytest.raises(RequestError, match="pickles"):
        chosen(None, "config.json", "pytorch_model.bin")
    with pytest.raises(RequestError, match="no config.json"):
        chosen(None, "adapter.safetensors")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("org/repo", Reference("org/repo")),
        ("org/repo:Q4_K_M", Reference("org/repo", "Q4_K_M")),
        ("https://huggingface.co/org/repo", Reference("org/repo")),
        ("hf.co/org/repo:Q8_0", Reference("org/repo", "Q8_0")),
        ("repo", None),
        ("a/b/c", None),
        ("org/..", None),
        ("org/--x", None),
    ],
)
def test_references(text, found):
    assert parse_reference(text) == found


@pytest.mark.parametrize("path", ["", "/x", "a//b", "../x", "a/../b", "a\\b", "C:x", "a\nb", "a/ "])
def test_paths_that_could_leave_their_folder(path):
    assert not is_safe_path(path)
