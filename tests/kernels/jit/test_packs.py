"""Packs of compiled kernels: used where all fits, left aside where anything does not, and the same bits."""

import functools
import json
import logging
import os
import runpy
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from localinfer.errors import BackendUnavailableError, RequestError
from localinfer.kernels import built_sources
from localinfer.kernels.cpu.encoding import ENCODERS
from localinfer.kernels.jit import host, isa, object_cache, packs
from localinfer.kernels.jit.isa import runs_on
from localinfer.kernels.jit.numba import all_kernels, source_of
from localinfer.kernels.versions import source_digests
from localinfer.loading.options import model_path
from localinfer.models.load.needed_kernels import needed_kernels
from tests.kernels.cpu.digest import products
from tests.kernels.subprocesses import REPOSITORY, finish, start

CODES = {"pool.work": b"code of work", "matmul.other": b"code of another" * 9}
LEVELS = packs.LEVELS.get(packs.architecture(), {})


def index_of_here(**changes: Any) -> dict[str, Any]:
    """Index of a pack that fits this process, with changes."""
    features = [name for name, is_there in host.host_features().items() if is_there][:3]
    whole = {"origin": packs._origin(), "path": isa.SELECTED.value, "features": features, "symbols": ["malloc"]}
    return whole | changes


def written(folder: Path, name: str = "one.pack", **changes: Any) -> Path:
    packs.write(folder / name, index_of_here(**changes), CODES)
    return folder / name


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`chosen_pack` anew with the packs of a folder that the user names, or without."""
    for name in [name for name in os.environ if name.startswith("NUMBA_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("LOCALINFER_GUARD", raising=False)

    def choose(named: Path | None) -> packs.Pack | None:
        if named is None:
            monkeypatch.delenv(packs.VARIABLE, raising=False)
        else:
            monkeypatch.setenv(packs.VARIABLE, str(named))
        return packs.chosen_pack.__wrapped__()

    return choose


def test_a_pack_that_fits_is_read_by_its_file_or_its_folder(tmp_path: Path, choose: Any) -> None:
    path = written(tmp_path)
    for named in (path, tmp_path):
        pack = choose(named)
        assert pack is not None and {name: pack.code(name) for name in CODES} == CODES
        assert not pack.has("pool.nothing")
    assert choose(None) is None


def test_a_pack_that_does_not_fit_is_left_aside_with_a_reason(
    tmp_path: Path, choose: Any, caplog: pytest.LogCaptureFixture
) -> None:
    origin = packs._origin()
    assert origin is not None
    others: list[tuple[dict[str, Any], str]] = [
        ({"origin": origin | {name: "another"}}, "another version of localinfer, or for another system")
        for name in origin
    ]
    others += [
        ({"path": "another"}, "it is for another, and "),
        ({"features": ["avx", "of-the-future"]}, "this CPU lacks .*of-the-future"),
        ({"symbols": ["malloc", "localinfer_no_such_symbol"]}, "this process has no localinfer_no_such_symbol"),
    ]
    for number, (changes, reason) in enumerate(others):
        path = written(tmp_path, f"{number}.pack", **changes)
        caplog.clear()
        assert choose(path) is None
        assert reason.split(".*")[-1] in caplog.text and str(path) in caplog.text
    # One that fits beside them is found; of two the one for more features.
    written(tmp_path, "fits.pack", features=[])
    assert choose(tmp_path).path.name == "fits.pack"
    written(tmp_path, "better.pack")
    assert choose(tmp_path).path.name == "better.pack"


def test_a_damaged_pack_is_left_aside_wherever_it_is_damaged(tmp_path: Path, choose: Any) -> None:
    whole = written(tmp_path).read_bytes()
    end = len(whole) - sum(map(len, CODES.values()))
    damaged = tmp_path / "damaged.pack"
    cuts = [whole[:length] for length in (0, 20, 39, 40, end - 1)]
    flips = [whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :] for place in (0, 32, 39, 40, end - 1)]
    for content in [*cuts, *flips, b"not a pack at all" * 99]:
        damaged.write_bytes(content)
        assert choose(damaged) is None
    damaged.unlink()
    assert choose(damaged) is None
    assert choose(tmp_path / "no folder") is None


def test_a_damaged_kernel_is_taken_from_the_cache_and_the_others_from_the_pack(
    tmp_path: Path, choose: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, (first, second) = written(tmp_path), CODES
    pack = choose(path)
    monkeypatch.setattr(packs, "chosen_pack", lambda: pack)
    monkeypatch.setattr(object_cache, "_damaged", set())
    monkeypatch.setattr(object_cache, "_path", lambda name: tmp_path / f"{name}.o")
    object_cache.store(tmp_path / f"{second}.o", b"compiled here")
    for content in (path.read_bytes()[:-1], path.read_bytes()[:-2] + b"??"):
        path.write_bytes(content)
        object_cache._damaged.clear()
        assert object_cache._code(first) == CODES[first] and object_cache._code(second) == b"compiled here"
        assert "is damaged at matmul.other" in caplog.text
        assert object_cache.Kernel(first).is_cached


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="Windows keeps owners another way")
def test_a_named_pack_that_others_could_have_written_is_refused(
    tmp_path: Path, choose: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path)
    for mode in (0o664, 0o646):
        path.chmod(mode)
        assert choose(path) is None and "can be written by others" in caplog.text
    path.chmod(0o644)
    assert choose(path) is not None
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert choose(path) is None or owner == 0


def test_packs_of_the_installed_package_are_those_that_its_build_wrote_down(
    tmp_path: Path, choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path)
    digest = packs.read(path).digest
    monkeypatch.setattr(packs, "_INSTALLED", tmp_path)
    for known, is_taken in (({}, False), ({path.name: digest}, True), ({path.name: "0" * 64}, False)):
        monkeypatch.setattr(built_sources, "PACKS", known)
        assert (choose(None) is not None) == is_taken
    monkeypatch.setattr(built_sources, "PACKS", {"missing.pack": digest})
    assert choose(None) is None


def test_settings_that_change_code_put_packs_aside(
    tmp_path: Path, choose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path)
    for name in ("NUMBA_CPU_NAME", "NUMBA_OPT", "LOCALINFER_GUARD"):
        with monkeypatch.context() as changed:
            changed.setenv(name, "1")
            assert choose(path) is None
            with pytest.raises(BackendUnavailableError, match="unset it"):
                next(packs.build(tmp_path))
    assert choose(path) is not None


def test_every_level_can_run_its_instruction_set_and_the_last_that_fits_has_most_features() -> None:
    for levels in packs.LEVELS.values():
        for level in levels.values():
            assert runs_on(level.path, level.features)
            better = [path for path in isa.ISA if path is not level.path and runs_on(path, level.features)]
            assert all(list(isa.ISA).index(path) > list(isa.ISA).index(level.path) for path in better)


def test_a_pack_has_every_kernel_once() -> None:
    names = all_kernels()
    sources = [source_of(name) for name in names]
    assert len(set(names)) == len(names) == len(set(map(id, sources))) > 150
    kernels = [*needed_kernels(model_path(None)), *ENCODERS.values()]
    assert {kernel.name for kernel in kernels} <= set(names)


def test_a_pack_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="cannot be written|make it"):
        packs.write(tmp_path / "none" / "one.pack", index_of_here(), CODES)


def test_a_wheel_has_the_packs_as_data() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["setuptools"]["package-data"]["localinfer.kernels"] == [f"packs/*{packs.SUFFIX}"]


def test_a_build_takes_the_packs_of_its_sources_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.setattr(os, "umask", lambda mode: mode)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    monkeypatch.setenv("LOCALINFER_BUILD_PACKS", str(tmp_path))
    build = runpy.run_path(str(REPOSITORY / "setup.py"))["BuildWithDigests"]
    origin, digests = packs._origin(), source_digests("kernels")
    assert origin is not None and digests is not None
    itself, target = (
        SimpleNamespace(distribution=SimpleNamespace(get_version=lambda: origin["version"])),
        tmp_path / "packs",
    )
    with pytest.raises(SystemExit, match="has no packs; make them with"):
        build._take_packs(itself, target, digests)
    path = written(tmp_path)
    assert build._take_packs(itself, target, digests) == {path.name: packs.read(path).digest}
    assert (target / path.name).read_bytes() == path.read_bytes()
    for name in ("version", "sources"):
        written(tmp_path, origin=origin | {name: "another"})
        with pytest.raises(SystemExit, match="is not of these sources; make it again"):
            build._take_packs(itself, target, digests)
    assert list(target.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="Windows keeps a linked object's file open")
def test_kernels_of_a_pack_compute_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the best level here, as a child of a build compiles it."""
    here = {name for name, is_there in host.host_features().items() if is_there}
    fitting = [name for name, level in LEVELS.items() if level.path is isa.SELECTED and level.features <= here]
    if not fitting:
        pytest.skip("no level is for this CPU")
    names = ["matmul.matmul_q8_0"]
    share = [fitting[-1], str(tmp_path), *names]
    finish(start(f"from localinfer.kernels.jit import packs\npacks.compile_share({share!r})"))
    symbols = [symbol for name in names for symbol in json.loads((tmp_path / f"{name}.json").read_bytes())]
    features = sorted(LEVELS[fitting[-1]].features)
    codes = {name: (tmp_path / f"{name}.o").read_bytes() for name in names}
    packs.write(tmp_path / "one.pack", index_of_here(features=features, symbols=symbols), codes)
    wanted, pack = products(), packs.read(tmp_path / "one.pack")
    assert packs.misfit(pack) is None
    taken: list[str] = []
    monkeypatch.setattr(packs.Pack, "code", lambda self, name: taken.append(name) or codes[name])
    monkeypatch.setattr(packs, "chosen_pack", lambda: pack)
    monkeypatch.setattr(object_cache, "_addresses", {})
    monkeypatch.setattr(object_cache, "_engine", functools.cache(object_cache._engine.__wrapped__))
    assert products() == wanted
    assert sorted(set(taken)) == sorted(names)


def test_the_warning_is_one(tmp_path: Path, choose: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose(tmp_path) is None
    assert [record.getMessage() for record in caplog.records] == [f"no pack of {tmp_path} is used: there is none"]
