import shutil
import subprocess
from pathlib import Path

from echo_node.host.sensors.programs import running


def test_a_program_is_found_by_the_name_of_its_file(tmp_path: Path) -> None:
    sleep = shutil.which("sleep")
    assert sleep is not None
    game = tmp_path / "A game with a long name.exe"
    shutil.copy(Path(sleep).resolve(), game)
    names = ("a GAME with a long name", "blender", "sleeep")
    assert running(names) == frozenset()
    with subprocess.Popen([game, "100"]) as process:
        try:
            assert running(names) == {"a GAME with a long name"}
            assert running((str(game),)) == {str(game)}
        finally:
            process.kill()
    assert running(names) == frozenset() == running(())
