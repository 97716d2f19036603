"""The programs of an environment share one limit for each resource. Each program can connect only to the others."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo_shared.cage import session_cage
from echo_shared.cage.session_terms import MIB, SessionTerms
from tests.echo_shared.cage.caged_run import environment, run
from tests.homeless import USER, run_homeless

if why := session_cage.unsupported(SessionTerms(directory="/", children="programs")):
    pytest.skip(why, allow_module_level=True)

HERE = Path(__file__).parent
CAUSES = {
    "bomb": (-9, "processes: it had "),
    "memory": (-9, "memory: it used "),
    "many_memories": (-9, "memory: it used "),
    "loop": (-9, "time: it used "),
    "loops": (-9, "time: it used "),
    "orphans": (-9, "time: it used "),
    "files": (-9, "disk: its files are larger than 16 MB"),
    "honest": (3, ""),
}


@pytest.fixture(scope="module")
def causes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[object]]]:
    program = HERE / "daring_program.py"
    directory = tmp_path_factory.mktemp("daring") / "own"
    terms = SessionTerms(
        directory=str(directory),
        reads=(str(program),),
        children="programs",
        memory_bytes=128 * MIB,
        step_cpu_s=1.0,
        processes=16,
        disk_bytes=16 * MIB,
    )
    done = run(terms, str(program), *CAUSES)
    assert done.returncode == 0, done.stderr
    assert list(directory.iterdir()) == []
    yield json.loads(done.stdout)


@pytest.mark.parametrize("way", CAUSES)
def test_programs_that_use_too_much_end_together(way: str, causes: dict[str, list[object]]) -> None:
    status, cause = CAUSES[way]
    assert causes[way][0] == status
    assert str(causes[way][1]).startswith(cause) and bool(causes[way][1]) == bool(cause)


REFUSED, UNREACHABLE, FORBIDDEN = "Connection refused", "Network is unreachable", "Permission denied"
USES = {
    "its_own_port": ["127.0.0.1", "hello"],
    "a_port_without_an_address": "127.0.0.1",
    "its_own_port_by_ipv6": "::1",
    "its_own_unix_socket": "connected",
    "another_port": REFUSED,
    "another_machine": UNREACHABLE,
    "a_port_that_it_had": REFUSED,
    "a_foreign_unix_socket": FORBIDDEN,
    "a_foreign_unix_socket_by_a_link": FORBIDDEN,
    "a_foreign_unix_socket_by_a_linked_directory": FORBIDDEN,
    "a_unix_socket_elsewhere": FORBIDDEN,
    "an_abstract_socket": FORBIDDEN,
    "datagrams": "Address family not supported by protocol",
    "fast_open": "Operation not permitted",
    "a_privileged_port": FORBIDDEN,
    "scheduling_of_its_thread": "set",
    "scheduling_of_the_warden": "Operation not permitted",
}


def talked(directory: Path, *connects: int, port: int) -> dict[str, object]:
    program = HERE / "talking_program.py"
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.bind(str(directory / "u"))
        foreign.listen()
        terms = SessionTerms(
            directory=str(directory / "own"), reads=(str(program),), children="programs", connects=connects
        )
        done = run(terms, str(program), str(port), str(directory / "u"))
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def test_programs_talk_among_themselves_only(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert talked(tmp_path, port=other.getsockname()[1]) == USES


def test_programs_reach_the_ports_in_the_settings(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert talked(tmp_path, port, port=port)["another_port"] == "connected"


FILES = r"""
import os, subprocess, sys
script = [
    "touch a; chmod 750 a; touch -d 2001-01-01 a; cp -p a b; stat -c '%a %Y' a b",
    "chmod 666 $0; touch $0; chmod 4755 a; stat -c %a a",
]
done = subprocess.run(["bash", "-c", "; ".join(script), sys.argv[1]], capture_output=True, text=True)
print(*done.stdout.splitlines(), sep="|")
try:
    os.fchmod(os.open(sys.argv[1], os.O_RDONLY), 0o666)
except PermissionError:
    print("refused")
"""


def test_programs_change_modes_and_times_of_their_own_files_only(tmp_path: Path) -> None:
    (tmp_path / "library").write_text("x")
    (tmp_path / "library").chmod(0o600)
    os.utime(tmp_path / "library", (5, 5))
    (tmp_path / "program.py").write_text(FILES)
    reads = (str(tmp_path / "program.py"), str(tmp_path / "library"))
    done = run(SessionTerms(directory=str(tmp_path / "own"), reads=reads, children="programs"), *reads)
    assert done.stdout.splitlines() == ["750 978307200|750 978307200|755", "refused"], done.stderr
    found = (tmp_path / "library").stat()
    assert (found.st_mode & 0o777, found.st_mtime) == (0o600, 5)


UNPRIVILEGED = """
import os, sys
from echo_shared.cage.session_terms import SessionTerms
from tests.echo_shared.cage.caged_run import environment, run
from tests.homeless import USER, run_homeless
directory, program = sys.argv[1:]
terms = SessionTerms(directory=directory, reads=(program,), children="programs", processes=16)
done = run(terms, program, "bomb", "honest")
print(os.getuid(), done.stdout, done.stderr)
"""


def test_a_user_without_rights_of_root_has_the_same_cage(tmp_path: Path) -> None:
    program = str(HERE / "daring_program.py")
    done = run_homeless(
        "-c", UNPRIVILEGED, str(tmp_path / "own"), program, env={"PYTHONPATH": environment()["PYTHONPATH"]}
    )
    said = re.match(rf'{USER} {{"bomb": \[-9, "processes: it had (\d+) processes', done.stdout)
    # A second fork may be counted before the warden ends the first fork above the limit.
    assert said and 16 <= int(said[1]) <= 17, done.stderr
    assert '"honest": [3, ""]' in done.stdout
