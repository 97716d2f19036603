"""Files in shared memory: other processes can read them, and however the owner ends, the memory is freed."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from echo_shared.artefacts.hashed_files import describe_files, verify_files
from echo_shared.artefacts.manifest import Manifest
from echo_shared.swarm import shared_memory
from echo_shared.swarm.shared_memory import MemorySegment, read
from echo_shared.wire.messages import SharedMemory

pytestmark = pytest.mark.skipif(not shared_memory.AVAILABLE, reason="this system or Python has no such memory")

HOLDER = """
import sys
from pathlib import Path
from echo_shared.artefacts.manifest import Manifest
from echo_shared.swarm.shared_memory import MemorySegment
segment = MemorySegment.of(Manifest.model_validate_json(sys.argv[1]), Path(sys.argv[2]))
print(segment.address.model_dump_json(), flush=True)
sys.stdin.read()
"""
READER = """
import os, sys
from pathlib import Path
from echo_shared.artefacts.manifest import Manifest
from echo_shared.wire.messages import SharedMemory
from echo_shared.swarm.shared_memory import read
os.setuid(int(sys.argv[1]))
read(SharedMemory.model_validate_json(sys.argv[2]), Manifest.model_validate_json(sys.argv[3]), Path(sys.argv[4]))
"""
NOBODY = 65_534


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    directory = tmp_path / "run-v000003"
    (directory / "sub").mkdir(parents=True)
    (directory / "adapter_model.safetensors").write_bytes(os.urandom(3_000_000))
    (directory / "sub" / "config.json").write_bytes(b"{}")
    (directory / "sub" / "empty.txt").touch()
    return directory


@pytest.fixture
def manifest(directory: Path) -> Manifest:
    return Manifest(
        kind="policy",
        run_id="run",
        name=directory.name,
        policy_version=3,
        carrier="keyframe",
        key_id=0,
        info_hash="ab" * 20,
        files=describe_files(directory),
    )


@pytest.fixture
def segment(manifest: Manifest, directory: Path) -> Iterator[MemorySegment]:
    segment = MemorySegment.of(manifest, directory)
    yield segment
    if path_of(segment.address).is_symlink():
        segment.close()


@pytest.fixture
def holder(manifest: Manifest, directory: Path) -> Iterator[tuple[subprocess.Popen[str], SharedMemory]]:
    """Yield a process that holds the files in memory, and the files' address."""
    arguments = [sys.executable, "-c", HOLDER, manifest.model_dump_json(), str(directory)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, SharedMemory.model_validate(json.loads(process.stdout.readline()))
        process.kill()


def path_of(address: SharedMemory) -> Path:
    return Path(f"/proc/{address.pid}/fd/{address.descriptor}")


def test_another_process_reads_the_artefact(
    holder: tuple[object, SharedMemory], manifest: Manifest, tmp_path: Path
) -> None:
    for reader in ("one", "two"):
        read(holder[1], manifest, tmp_path / reader)
        verify_files(manifest, tmp_path / reader)


def test_after_kill_9_nothing_is_left(
    holder: tuple[subprocess.Popen[str], SharedMemory], manifest: Manifest, tmp_path: Path
) -> None:
    process, address = holder
    with path_of(address).open("rb") as late_reader:
        process.kill()
        process.wait()
        with pytest.raises(OSError):
            read(address, manifest, tmp_path / "node")
        assert len(late_reader.read()) == manifest.total_bytes, "an open reader can read to the end"
    left = [*descriptors(), *Path("/dev/shm").iterdir()]
    assert not any(address.name in str(path) for path in left)


def descriptors() -> Iterator[Path]:
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            yield link.readlink()
        except OSError:
            continue  # The process has closed the file in the meantime.


def test_a_closed_artefact_cannot_be_opened_but_open_readers_finish(
    segment: MemorySegment, manifest: Manifest, tmp_path: Path
) -> None:
    with path_of(segment.address).open("rb") as early_reader:
        segment.close()
        with pytest.raises(OSError):
            read(segment.address, manifest, tmp_path / "node")
        assert len(early_reader.read()) == manifest.total_bytes


@pytest.mark.parametrize(
    "elsewhere",
    [
        lambda address: address.model_copy(update={"pid": 2**31 - 1}),
        lambda address: address.model_copy(update={"descriptor": 2**31 - 1}),
        lambda address: address.model_copy(update={"name": f"echo-{'0' * 32}"}),
    ],
)
def test_other_files_at_the_same_address_are_refused(
    segment: MemorySegment, manifest: Manifest, tmp_path: Path, elsewhere: Callable[[SharedMemory], SharedMemory]
) -> None:
    with pytest.raises(OSError):
        read(elsewhere(segment.address), manifest, tmp_path / "node")
    assert not (tmp_path / "node").exists()


def test_a_pipe_at_the_address_is_not_read(manifest: Manifest, tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"not yours")
    with pytest.raises(OSError, match="is not the memory file echo-"):
        read(SharedMemory(pid=os.getpid(), descriptor=reading, name=f"echo-{'0' * 32}"), manifest, tmp_path / "node")
    assert os.read(reading, 100) == b"not yours"
    os.close(reading)
    os.close(writing)


def test_a_pipe_swapped_in_during_the_check_is_noticed(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    check, looks = shared_memory._check_name, []

    def only_the_second(link: Path, address: SharedMemory) -> None:
        looks.append(link)
        if len(looks) == 2:
            check(link, address)

    monkeypatch.setattr(shared_memory, "_check_name", only_the_second)
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError, match="is not the memory file echo-"):
        read(SharedMemory(pid=os.getpid(), descriptor=reading, name=f"echo-{'0' * 32}"), manifest, tmp_path / "node")
    assert sorted(Path("/proc/self/fd").iterdir()) == before
    os.close(reading)


def test_memory_that_was_cut_short_is_an_error(segment: MemorySegment, manifest: Manifest, tmp_path: Path) -> None:
    os.truncate(path_of(segment.address), 1_000)
    with pytest.raises(OSError, match="too early"):
        read(segment.address, manifest, tmp_path / "node")


def test_an_artefact_that_is_not_whole_is_not_put_in(manifest: Manifest, directory: Path) -> None:
    (directory / "sub" / "config.json").unlink()
    before = sorted(Path("/proc/self/fd").iterdir())
    with pytest.raises(OSError):
        MemorySegment.of(manifest, directory)
    assert sorted(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_reads_nothing(holder: tuple[object, SharedMemory], manifest: Manifest, tmp_path: Path) -> None:
    given = (holder[1].model_dump_json(), manifest.model_dump_json(), str(tmp_path / "node"))
    assert subprocess.run([sys.executable, "-c", READER, "0", *given], check=False).returncode == 0
    refused = subprocess.run(
        [sys.executable, "-c", READER, str(NOBODY), *given], check=False, capture_output=True, text=True
    )
    assert "PermissionError" in refused.stderr and "/proc/" in refused.stderr
