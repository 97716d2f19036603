from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time

import pytest

from echo_shared.errors import ConfigError
from echo_shared.process.abandonable import abandonable


def test_it_returns_the_functions_result_or_error() -> None:
    def add(a: int, b: int) -> tuple[int, bool]:
        return a + b, threading.current_thread() is threading.main_thread()

    def fail() -> None:
        raise ConfigError("It is wrong.")

    assert asyncio.run(abandonable(add, 1, 2)) == (3, False)
    with pytest.raises(ConfigError, match="wrong"):
        asyncio.run(abandonable(fail))


STUCK = """
import sys, time
from echo_shared.process.abandonable import abandonable
from echo_hub.commands.until_stopped import run_until_stopped
def work():
    print("begun", flush=True)
    {work}
run_until_stopped(abandonable(work))
print("ended", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("work", ["time.sleep(600)", "while True: pass"])
def test_a_command_ends_at_a_signal_despite_a_busy_thread(work: str, number: int) -> None:
    command = [sys.executable, "-c", STUCK.format(work=work)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "begun\n"
            process.send_signal(number)
            began = time.monotonic()
            assert process.stdout.read() == "ended\n"
            assert process.wait(timeout=30) == 0
            assert time.monotonic() - began < 20
        finally:
            process.kill()
