"""The mmproj file that belongs to a model, in folders as users and the hub have them."""

from pathlib import Path

import pytest

from localinfer.models.media.companion import find_companion
from tests.support.seeing_model import write_mmproj

WIDTH = 64
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FOLDERS = [
    # model, its folder's other files, what is found
    ("m-Q4_K_M.gguf", ["mmproj-m-f16.gguf"], "mmproj-m-f16.gguf"),
    ("m-Q4_K_M.gguf", ["mmproj.gguf"], "mmproj.gguf"),
    ("m-Q4_K_M.gguf", ["mmproj-model-f16.gguf"], "mmproj-model-f16.gguf"),
    ("m-Q4_K_M.gguf", ["m-Q8_0.gguf", "mmproj-F16.gguf"], "mmproj-F16.gguf"),
    ("m-Q4_0-00001-of-00002.gguf", ["m-Q4_0-00002-of-00002.gguf", "mmproj-m.gguf"], "mmproj-m.gguf"),
    ("m-3b-it-Q4_0.gguf", ["other-7b-Q4_0.gguf", "mmproj-m-3b-it-F16.gguf"], "mmproj-m-3b-it-F16.gguf"),
    ("other-7b-Q4_0.gguf", ["m-3b-it-Q4_0.gguf", "mmproj-m-3b-it-F16.gguf"], None),
    ("gemma.gguf", ["gemma-ple.gguf", "mmproj-gemma.gguf", "mmproj-gemma-ple.gguf"], "mmproj-gemma.gguf"),
    ("gemma-ple.gguf", ["gemma.gguf", "mmproj-gemma.gguf", "mmproj-gemma-ple.gguf"], "mmproj-gemma-ple.gguf"),
    ("gemma-ple.gguf", ["gemma.gguf", "mmproj-gemma.gguf"], None),
    ("a.gguf", ["b.gguf", "mmproj-F16.gguf"], None),
    ("a.gguf", ["b.gguf"], None),
    ("a.gguf", [], None),
]


@pytest.mark.parametrize(("model", "others", "expected"), FOLDERS)
def test_the_file_is_found_where_it_is_clear_whose_it_is(
    tmp_path: Path, model: str, others: list[str], expected: str | None
) -> None:
    (tmp_path / model).touch()
    for name in others:
        write_mmproj(tmp_path / name, WIDTH) if "mmproj" in name else (tmp_path / name).touch()
    found = find_companion(tmp_path / model, WIDTH)
    assert (None if found is None else found.name) == expected
    assert find_companion(tmp_path / model, WIDTH + 1) is None


def test_of_several_the_type_of_the_weights_decides_whatever_their_names(tmp_path: Path) -> None:
    (tmp_path / "m-Q4_0.gguf").touch()
    for kind in ("Q8_0", "F32", "BF16", "F16"):
        written = write_mmproj(tmp_path / f"mmproj-{kind[::-1]}.gguf", WIDTH, kind=kind)
        assert find_companion(tmp_path / "m-Q4_0.gguf", WIDTH) == written


def test_a_file_at_the_top_of_a_pulled_repository_is_found(tmp_path: Path) -> None:
    top = tmp_path / "snapshots" / COMMIT
    (top / "Q4_K_M").mkdir(parents=True)
    model = top / "Q4_K_M" / "m-Q4_K_M.gguf"
    model.touch()
    expected = write_mmproj(top / "mmproj-F16.gguf", WIDTH)
    assert find_companion(model, WIDTH) == expected
    beside = write_mmproj(model.parent / "mmproj-F16.gguf", WIDTH)
    assert find_companion(model, WIDTH) == beside


def test_damaged_candidates_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").touch()
    (tmp_path / "mmproj-a.gguf").write_bytes(b"GGUF and no more")
    assert find_companion(tmp_path / "m.gguf", WIDTH) is None
    sound = write_mmproj(tmp_path / "mmproj-b.gguf", WIDTH)
    assert find_companion(tmp_path / "m.gguf", WIDTH) == sound
