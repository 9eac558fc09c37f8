"""Every place where a user names an output, on everything that such a name may stand for."""

import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from localinfer.apps.bench.charts import save_figure
from localinfer.apps.cli import EXIT_BAD_INPUT, main
from localinfer.errors import LocalinferError, RequestError, SessionFileError
from localinfer.kernels.cpu.program import ThreadPool
from localinfer.llm import LLM
from localinfer.models import demo
from localinfer.quant.formats.types import TensorRecord, TensorType
from localinfer.quant.gguf.reader import read_gguf
from localinfer.quant.gguf.writer import GGUFWriter, encode_value
from localinfer.quant.methods.imatrix import Importance, write_imatrix
from localinfer.quant.methods.presets import find_preset
from localinfer.quant.pipeline.quantize import quantize_model
from localinfer.system import disk
from localinfer.system.files import OutputFile, check_output, is_written_in_place
from tests.engine.fakes import fake_model
from tests.kernels.subprocesses import REPOSITORY, environment
from tests.storage.test_prompt_cache import FakeIdentity
from tests.support.limits import seconds

MODEL = Path(demo.__file__).parent / "demo-f16.gguf"
OLD = b"what was there before, longer than some outputs are"
unix_only = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such thing")
not_root = pytest.mark.skipif(not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can become another user")


def write_session(path: Path) -> None:
    with LLM(fake_model(), identity=FakeIdentity()) as llm:  # type: ignore[arg-type]
        llm.complete([256, *b"hello"], max_tokens=4, temperature=0)
        llm.save_session(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one tensor."""
    path = tmp_path_factory.mktemp("small") / "small.gguf"
    values = {"general.architecture": "llama", "llama.block_count": 1, "llama.attention.head_count": 1}
    with GGUFWriter(
        path,
        {key: encode_value(value) for key, value in values.items()},
        [TensorRecord("token_embd.weight", TensorType.F32, (4, 32))],
    ) as writer:
        writer.write(np.ones((4, 32), np.float32))
    return path


def write_model(path: Path, small: Path) -> None:
    pool = ThreadPool(1)
    try:
        with read_gguf(small) as source:
            quantize_model(source, path, find_preset("Q8_0"), pool)
    finally:
        pool.close()


class Picture:
    """Draws as a figure of matplotlib's does, which is not installed everywhere."""

    def savefig(self, file: BinaryIO, format: str) -> None:
        file.write(format.encode() * 100)


def write_chart(path: Path) -> None:
    save_figure(Picture(), path)  # type: ignore[arg-type]


def write_importance(path: Path) -> None:
    write_imatrix(path, Importance("", {"blk.0.x.weight": np.ones((1, 32), np.float32)}, "text", 1), 8)


def write_lines(path: Path) -> None:
    with OutputFile(path) as file:
        for _ in range(100):
            file.write(b"a line of an output\n" * 10)


OUTPUTS = ("session", "model", "chart", "imatrix", "lines")
Write = Callable[[Path], None]


@pytest.fixture(params=OUTPUTS)
def write(request: pytest.FixtureRequest, small: Path) -> Write:
    return {
        "session": write_session,
        "model": lambda path: write_model(path, small),
        "chart": write_chart,
        "imatrix": write_importance,
        "lines": write_lines,
    }[request.param]


@pytest.fixture
def whole(write: Write, tmp_path: Path) -> bytes:
    """What the output holds where nothing stands in its way."""
    path = tmp_path / "unhindered"
    write(path)
    content = path.read_bytes()
    path.unlink()
    return content


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def refused(write: Write, path: Path, *words: str) -> None:
    with pytest.raises(LocalinferError) as caught:
        write(path)
    message = str(caught.value)
    assert "cannot be written" in message and str(path) in message
    assert all(word in message for word in words), message


def test_new_file_appears_alone(write: Write, whole: bytes, tmp_path: Path) -> None:
    write(tmp_path / "out")
    assert (tmp_path / "out").read_bytes() == whole
    assert entries(tmp_path) == {"out"}


@unix_only
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o755])
def test_old_file_is_replaced_and_keeps_its_mode(write: Write, whole: bytes, mode: int, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(OLD)
    path.chmod(mode)
    write(path)
    assert path.read_bytes() == whole
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert entries(tmp_path) == {"out"}


@unix_only
@pytest.mark.parametrize("hops", [1, 3])
def test_link_stays_and_its_file_is_replaced(write: Write, whole: bytes, hops: int, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    place = tmp_path / "far" / "out"
    place.write_bytes(OLD)
    place.chmod(0o640)
    for index in range(hops):
        link = tmp_path / f"link{index}"
        link.symlink_to(place)
        place = link
    write(place)
    assert all((tmp_path / f"link{index}").is_symlink() for index in range(hops))
    assert (tmp_path / "far" / "out").read_bytes() == whole
    assert stat.S_IMODE((tmp_path / "far" / "out").stat().st_mode) == 0o640
    assert entries(tmp_path / "far") == {"out"}


@unix_only
def test_link_to_nothing_makes_the_file_it_names(write: Write, whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "link").symlink_to("far/out")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "far" / "out").read_bytes() == whole


@unix_only
def test_pipe_that_is_read_gets_the_same_bytes(write: Write, whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    # Opened for both, so that opening does not wait for the writer.
    descriptor = os.open(path, os.O_RDWR)
    received = bytearray()

    def read() -> None:
        while len(received) < len(whole):
            received.extend(os.read(descriptor, 1 << 16))

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        write(path)
        reader.join(seconds(15))
    finally:
        os.close(descriptor)
    assert bytes(received) == whole
    assert stat.S_ISFIFO(path.lstat().st_mode) and entries(tmp_path) == {"pipe"}


@unix_only
def test_pipe_that_nobody_reads_is_refused(write: Write, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    refused(write, tmp_path / "pipe", "no program reads this pipe")
    assert stat.S_ISFIFO((tmp_path / "pipe").lstat().st_mode) and entries(tmp_path) == {"pipe"}


@pytest.fixture
def device(tmp_path: Path) -> Callable[[int], Path]:
    """Makes character devices of a minor number among those of memory: 3 takes everything, 7 is full, 5 takes too."""

    def make(minor: int) -> Path:
        path = tmp_path / f"device{minor}"
        try:
            os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, minor))
            os.close(os.open(path, os.O_WRONLY))
        except (AttributeError, OSError) as error:
            pytest.skip(f"this process cannot make devices: {error}")
        return path

    return make


def is_device(path: Path, minor: int) -> bool:
    status = path.lstat()
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == os.makedev(1, minor)


@unix_only
@pytest.mark.parametrize("minor", [3, 5])
def test_device_is_written_and_stays_a_device(write: Write, device: Callable[[int], Path], minor: int) -> None:
    path = device(minor)
    write(path)
    assert is_device(path, minor) and entries(path.parent) == {path.name}


@unix_only
def test_full_device_is_an_error_and_stays_a_device(write: Write, device: Callable[[int], Path]) -> None:
    path = device(7)
    refused(write, path, "No space left", "free some space")
    assert is_device(path, 7) and entries(path.parent) == {path.name}


@unix_only
@pytest.mark.parametrize("name", ["/dev/null", "/dev/zero"])
def test_the_systems_devices_stay_devices(write: Write, name: str) -> None:
    before = os.lstat(name)
    write(Path(name))
    after = os.lstat(name)
    assert stat.S_ISCHR(after.st_mode)
    assert (after.st_ino, after.st_rdev, after.st_mode) == (before.st_ino, before.st_rdev, before.st_mode)


def as_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(path))


def in_a_loop(path: Path) -> None:
    path.symlink_to(path)


OTHER_THINGS: dict[str, tuple[Callable[[Path], object], str]] = {
    "folder": (Path.mkdir, "folder"),
    "socket": (as_socket, "socket"),
    "link to itself": (in_a_loop, "symbolic links"),
}


@unix_only
@pytest.mark.parametrize("thing", OTHER_THINGS)
def test_what_is_no_file_is_refused_and_left_alone(write: Write, thing: str, tmp_path: Path, monkeypatch) -> None:
    # A socket's path is short: relative to the folder.
    monkeypatch.chdir(tmp_path)
    make, word = OTHER_THINGS[thing]
    make(Path("out"))
    before = os.lstat("out")
    refused(write, Path("out"), word)
    after = os.lstat("out")
    assert (after.st_ino, after.st_mode) == (before.st_ino, before.st_mode)
    assert entries(tmp_path) == {"out"}


def test_file_marked_read_only_is_refused_and_left_alone(write: Write, tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(OLD)
    path.chmod(0o444)
    refused(write, path, "read-only")
    assert path.read_bytes() == OLD and entries(tmp_path) == {"out"}
    path.chmod(0o644)


def test_folder_that_is_missing_or_a_file_is_refused(write: Write, tmp_path: Path) -> None:
    refused(write, tmp_path / "no" / "out", "there is no folder", "make it")
    (tmp_path / "file").write_bytes(OLD)
    refused(write, tmp_path / "file" / "out")
    assert (tmp_path / "file").read_bytes() == OLD and entries(tmp_path) == {"file"}


@pytest.fixture
def small_limit() -> Iterator[None]:
    """Lets files of this process grow to 100 bytes, as a disk does that is almost full."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@unix_only
def test_full_disk_keeps_the_old_file_and_leaves_nothing(write: Write, tmp_path: Path, small_limit: None) -> None:
    (tmp_path / "out").write_bytes(OLD)
    refused(write, tmp_path / "out", "free some space")
    assert (tmp_path / "out").read_bytes() == OLD and entries(tmp_path) == {"out"}
    refused(write, tmp_path / "new")
    assert entries(tmp_path) == {"out"}


def test_name_as_long_as_names_may_be_is_written(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)
    try:
        path.write_bytes(OLD)
    except OSError:
        pytest.skip("this system's names are shorter")
    write_lines(path)
    assert path.stat().st_size > len(OLD)


@pytest.mark.parametrize("name", ["", "folder/", "nul\0byte", "x" * 5000])
def test_names_that_no_file_can_have_are_refused(name: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RequestError, match="cannot be written"), OutputFile(name):
        pass
    with pytest.raises(RequestError, match="cannot be written"):
        check_output(name)
    assert not is_written_in_place(name) and entries(tmp_path) == set()


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ValueError])
def test_whatever_ends_the_writing_early_leaves_the_old_file(failure: type[BaseException], tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(OLD)
    with pytest.raises(failure), OutputFile(tmp_path / "out") as file:
        file.write(b"half")
        raise failure
    assert (tmp_path / "out").read_bytes() == OLD and entries(tmp_path) == {"out"}


def test_file_that_another_process_replaces_meanwhile_is_not_written_in_place(tmp_path: Path, monkeypatch) -> None:
    path = tmp_path / "out"
    path.write_bytes(OLD)
    seen = disk.status(path)
    answers = iter([seen])
    status = disk.status
    monkeypatch.setattr(disk, "status", lambda path, **options: next(answers, None) or status(path, **options))
    (tmp_path / "theirs").write_bytes(b"theirs")
    os.replace(tmp_path / "theirs", path)
    with OutputFile(path) as file:
        file.write(b"half")
        assert path.read_bytes() == b"theirs"
    assert path.read_bytes() == b"half"


@unix_only
def test_file_is_synced_before_it_takes_its_name_and_the_folder_after(tmp_path: Path, monkeypatch) -> None:
    done = []
    for name in ("sync", "replace", "sync_folder"):
        call = getattr(disk, name)
        monkeypatch.setattr(disk, name, lambda *of, name=name, call=call: (done.append(name), call(*of))[1])
    write_lines(tmp_path / "lines")
    assert done == ["sync", "replace", "sync_folder"]


@unix_only
def test_new_file_has_the_usual_mode_and_a_private_one_its_owner_only(tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    usual = stat.S_IMODE((tmp_path / "usual").stat().st_mode)
    write_lines(tmp_path / "lines")
    write_session(tmp_path / "session")
    assert stat.S_IMODE((tmp_path / "lines").stat().st_mode) == usual
    assert stat.S_IMODE((tmp_path / "session").stat().st_mode) == 0o600


@unix_only
@not_root
def test_folder_and_file_of_another_user_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    (folder / "file").write_bytes(OLD)
    code = f"""
import os, sys
sys.path.insert(0, {os.fspath(REPOSITORY)!r})
from localinfer.errors import RequestError
from localinfer.system.files import OutputFile, check_output
os.chdir({os.fspath(folder)!r})
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for name in ("file", "new"):
    for attempt in (OutputFile(name).__enter__, lambda: check_output(name)):
        try:
            attempt()
        except RequestError as error:
            print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=seconds(25), check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 4 and all("cannot be written" in line and "write elsewhere" in line for line in lines)
    assert (folder / "file").read_bytes() == OLD and entries(folder) == {"file"}


@unix_only
@not_root
def test_owner_of_an_old_file_stays(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(OLD)
    os.chown(tmp_path / "out", 12345, 23456)
    write_lines(tmp_path / "out")
    status = (tmp_path / "out").stat()
    assert (status.st_uid, status.st_gid) == (12345, 23456)


@unix_only
def test_open_file_that_was_deleted_is_written_where_it_is(tmp_path: Path) -> None:
    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("open files have no names here")
    with open(tmp_path / "deleted", "w+b") as file:
        file.write(OLD)
        file.flush()
        (tmp_path / "deleted").unlink()
        try:
            os.close(os.open(f"/proc/self/fd/{file.fileno()}", os.O_WRONLY))
        except OSError as error:
            pytest.skip(f"a deleted file cannot be opened again here: {error}")
        with OutputFile(f"/proc/self/fd/{file.fileno()}") as output:
            output.write(b"new")
        file.seek(0)
        assert file.read() == b"new"
    assert entries(tmp_path) == set()


COMMANDS: dict[str, list[str]] = {
    "quantize": ["quantize", "MODEL", "OUT"],
    "save-imatrix": ["quantize", "MODEL", "other.gguf", "--method", "imatrix", "--save-imatrix", "OUT"],
    "save-imatrix before gptq": ["quantize", "MODEL", "other.gguf", "--method", "gptq", "--save-imatrix", "OUT"],
    "roofline": ["bench", "MODEL", "--roofline", "--output", "OUT"],
    "ablation": ["bench", "ablation", "MODEL", "--output", "OUT"],
    "serve chart": ["bench", "MODEL", "--serve", "--output", "OUT"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("thing", ["folder", "missing folder", "read-only file", "the model"])
def test_commands_refuse_before_they_begin(
    command: str, thing: str, tmp_path: Path, monkeypatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model, out = tmp_path / "model.gguf", tmp_path / "out"
    try:
        os.link(MODEL, model)
    except OSError:
        shutil.copyfile(MODEL, model)
    if thing == "folder":
        out.mkdir()
    elif thing == "missing folder":
        out = out / "chart"
    elif thing == "read-only file":
        out.write_bytes(OLD)
        out.chmod(0o444)
    else:
        out = model
    before = entries(tmp_path)
    words = [{"MODEL": str(model), "OUT": str(out)}.get(word, word) for word in COMMANDS[command]]
    assert main(words) == EXIT_BAD_INPUT
    printed = capsys.readouterr()
    assert str(out) in printed.err and (printed.err.count("\n"), printed.out) == (1, "")
    assert entries(tmp_path) == before and model.stat().st_size == MODEL.stat().st_size


def test_session_does_not_replace_the_model(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(OLD)
    identity = FakeIdentity(paths=(model,))
    with LLM(fake_model(), identity=identity) as llm:  # type: ignore[arg-type]
        llm.complete([256, *b"hello"], max_tokens=4, temperature=0)
        with pytest.raises(SessionFileError, match="write to another file"):
            llm.save_session(model)
    assert model.read_bytes() == OLD


def test_model_and_imatrix_under_one_name_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["quantize", str(MODEL), str(tmp_path / "out"), "--method", "imatrix", "--save-imatrix"]
    assert main([*words, str(tmp_path / "out")]) == EXIT_BAD_INPUT
    assert "different names" in capsys.readouterr().err and entries(tmp_path) == set()
