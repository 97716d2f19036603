"""Under a user's real systemd, the installer started by the node's service survives when it stops that service."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest

from tests.echo_node.host.installed import make_copy, note
from tests.echo_node.host.user_systemd import run_in_session, why_not

SESSION: Final = """
systemd-run --user --quiet --unit=echo-node.service --setenv=PYTHONPATH="$PYTHONPATH" "$PYTHON" -c "$CODE"
until [ -e "$HOME/done" ]; do sleep 0.1; done
systemctl --user show --property ActiveState --value echo-node.service > "$HOME/state"
"""
CODE: Final = """
import asyncio
from pathlib import Path
from echo_node.host.installed_copy import InstalledCopy
from echo_node.host.installing import install
copy = InstalledCopy(Path({copy!r}))
asyncio.run(install(copy, copy.given(), Path({log!r})))
"""
INSTALLER: Final = """
echo "with $*"
systemctl --user stop echo-node.service
echo "the service has ended, and this has not"
touch "$HOME/done"
"""


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can")
def test_the_installer_outlives_the_service_that_runs_it(tmp_path: Path) -> None:
    home, log = tmp_path / "a home", tmp_path / "logs of it" / "update.log"
    (home / ".config").mkdir(parents=True)
    copy = make_copy(home / "swarm", INSTALLER)
    note(copy.environment, source="/x y.tar", environment={"HOME": str(home)})
    run_in_session(SESSION, home, {"CODE": CODE.format(copy=str(copy.environment), log=str(log))})
    assert log.read_text() == "with --from /x y.tar --running\nthe service has ended, and this has not\n"
    assert (home / "state").read_text().strip() in ("inactive", "failed")
