"""Choosing an instruction set, and the same bits from each."""

import errno
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from llvmlite import binding as llvm

from localinfer.errors import BackendUnavailableError
from localinfer.kernels.cpu.compiled.emit import target_isa
from localinfer.kernels.jit import host, isa
from localinfer.kernels.jit.isa import ISA, available, runs_on, select
from tests.kernels.cpu.digest import cached, chosen, encoded, products, recurrent
from tests.kernels.subprocesses import REPOSITORY, finish, start
from tests.support.limits import seconds

IS_X86 = llvm.get_process_triple().startswith("x86_64")
# A CPU of before AVX, float16 conversion and fused multiply-add: what the generic path must do without.
OLD_CPU = {"NUMBA_CPU_NAME": "nehalem", "NUMBA_CPU_FEATURES": ""} if IS_X86 else {}
AVX2_FEATURES = ["avx2", "fma", "f16c"]


def test_available_paths_are_best_first_and_end_with_the_generic_one() -> None:
    paths = available()
    assert paths == [path for path in ISA if path in paths]
    assert paths[-1] is ISA.GENERIC
    assert isa.SELECTED in paths


@pytest.mark.parametrize("wanted", [None, ""])
def test_select_takes_the_best_path_unless_one_is_forced(wanted: str | None) -> None:
    assert select(wanted) is available()[0]
    assert [select(path.value) for path in available()] == available()


@pytest.mark.parametrize("wanted", ["sse9", "AVX2", "neon" if IS_X86 else "avx2"])
def test_select_refuses_what_the_cpu_lacks_and_names_what_it_has(wanted: str) -> None:
    with pytest.raises(BackendUnavailableError, match=f"'{wanted}'.*runs .*generic.*unset it"):
        select(wanted)


def test_a_forced_path_the_cpu_lacks_ends_in_a_typed_error_not_an_abort() -> None:
    process = start("import localinfer.kernels.jit.object_cache", LOCALINFER_ISA="neon" if IS_X86 else "avx2")
    _, errors = process.communicate(timeout=seconds(15))
    assert process.returncode == 1
    assert "BackendUnavailableError: LOCALINFER_ISA" in errors


def test_runs_on_takes_either_form_of_vnni() -> None:
    assert not runs_on(ISA.AVX_VNNI, AVX2_FEATURES)
    assert runs_on(ISA.AVX_VNNI, [*AVX2_FEATURES, "avxvnni"])
    assert runs_on(ISA.AVX_VNNI, [*AVX2_FEATURES, "avx512vnni", "avx512vl"])
    assert not runs_on(ISA.AVX512_VNNI, [*AVX2_FEATURES, "avx512vnni", "avx512vl"])
    assert runs_on(ISA.GENERIC, [])


AMX_FEATURES = sorted({*AVX2_FEATURES, *"avx512f avx512bw avx512vl avx512dq avx512vnni amx-tile amx-int8".split()})
REFUSAL = "Linux refuses it to this process: No space left on device"


@pytest.fixture
def amx_cpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Make this CPU one with some features, and the system answer with an error number; the requests so far."""

    def make(features: list[str], answer: int) -> list[int]:
        asked: list[int] = []

        def syscall(*arguments: int) -> int:
            asked.extend(arguments)
            host.ctypes.set_errno(answer)
            return -1 if answer else 0

        monkeypatch.setattr(host.ctypes, "CDLL", lambda *_, **__: SimpleNamespace(syscall=syscall))
        monkeypatch.setattr(host, "amx_refusal", functools.cache(host.amx_refusal.__wrapped__))
        monkeypatch.setattr(isa, "amx_refusal", host.amx_refusal)
        monkeypatch.setattr(isa, "host_features", lambda: dict.fromkeys(features, True))
        monkeypatch.setattr(host.sys, "platform", "linux")
        return asked

    return make


def test_amx_is_taken_where_it_is_named_and_the_system_grants_it_once(
    amx_cpu: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = amx_cpu(AMX_FEATURES, 0)
    assert select(None) is available()[0] is ISA.AVX512_VNNI
    assert asked == []
    assert select("amx") is ISA.AMX
    assert "have run on no such CPU yet" in str(isa.amx_refusal_here())
    monkeypatch.setattr(isa, "SELECTED", ISA.AMX)
    assert isa.amx_refusal_here() is None
    assert asked == [158, 0x1023, 18]


def test_amx_that_the_system_refuses_is_left_aside_and_the_reason_is_known(amx_cpu: Callable[..., list[int]]) -> None:
    asked = amx_cpu(AMX_FEATURES, errno.ENOSPC)
    assert select(None) is ISA.AVX512_VNNI
    assert isa.amx_refusal_here() == REFUSAL
    with pytest.raises(BackendUnavailableError, match=f"'amx'.*runs avx512vnni.*{REFUSAL}.*unset it"):
        select("amx")
    assert asked == [158, 0x1023, 18]


@pytest.mark.parametrize("lacking", ["amx-tile", "amx-int8", "avx512vnni"])
def test_nothing_is_asked_of_the_system_where_the_cpu_lacks_a_part(
    amx_cpu: Callable[..., list[int]], lacking: str
) -> None:
    asked = amx_cpu([name for name in AMX_FEATURES if name != lacking], 0)
    assert ISA.AMX not in available()
    assert isa.amx_refusal_here() is None
    with pytest.raises(BackendUnavailableError, match="'amx'"):
        select("amx")
    assert asked == []


def test_no_other_system_than_linux_is_asked(
    amx_cpu: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = amx_cpu(AMX_FEATURES, 0)
    monkeypatch.setattr(host.sys, "platform", "win32")
    with pytest.raises(BackendUnavailableError, match="win32 is not known to allow it"):
        select("amx")
    assert isa.amx_refusal_here() == "win32 is not known to allow it"
    assert asked == []


@pytest.mark.parametrize(
    ("features", "wanted"),
    [
        (",".join(f"+{name}" for name in AMX_FEATURES), ISA.AMX),
        (",".join(f"+{name}" for name in AMX_FEATURES if name != "amx-int8"), ISA.AVX512_VNNI),
        ("+avx2,+fma,+f16c,+avxvnni,-avx512f", ISA.AVX_VNNI),
        ("+avx2,+fma,+f16c,-avxvnni", ISA.AVX2),
        ("+avx2", ISA.GENERIC),
        ("", ISA.GENERIC),
    ],
)
def test_intrinsics_fall_back_to_what_the_compile_target_has(
    features: str, wanted: ISA, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isa, "SELECTED", ISA.AMX)
    codegen = SimpleNamespace(magic_tuple=lambda: ("x86_64-unknown-linux-gnu", "some-cpu", features))
    context: Any = SimpleNamespace(codegen=lambda: codegen)
    assert target_isa(context) is wanted


@pytest.mark.skipif(isa.SELECTED is ISA.GENERIC, reason="this CPU has no other path")
def test_the_path_for_every_cpu_computes_the_same_bits_in_whole_kernels() -> None:
    """One of each family; the others differ from it in products alone, which `test_assembly.py` compares by layout."""
    # It is missing some kernels after the other: a child process for each time would import Numba again.
    alone = "from localinfer.kernels.jit import compile_ahead; compile_ahead.can_start_children = lambda: False"
    families = (products, cached, recurrent, encoded, chosen)
    calls = ", ".join(f"digest.{family.__name__}()" for family in families)
    code = f"{alone}; from tests.kernels.cpu import digest; print({calls})"
    process = start(code, REPOSITORY, LOCALINFER_ISA=ISA.GENERIC.value, **OLD_CPU)
    try:
        wanted = [family() for family in families]
        output, _ = finish(process)
    finally:
        process.kill()
        process.communicate()
    assert output.split() == wanted


def test_products_of_pairs_of_rows_compute_the_same_bits_without_their_instruction() -> None:
    """As another CPU computes them by it: weights and activations are stored otherwise."""
    code = (
        "from localinfer.kernels.jit import compile_ahead, isa; isa.SELECTED = isa.ISA.NEON_I8MM; "
        "compile_ahead.can_start_children = lambda: False; "
        "from tests.kernels.cpu import digest; print(digest.products())"
    )
    process = start(code, REPOSITORY)
    try:
        output, _ = finish(process)
    finally:
        process.kill()
        process.communicate()
    assert output.split() == [products()]
