import asyncio
import signal
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from echo_node.core.traffic import Amount, Traffic
from echo_node.core.troubles import TroubleCode
from echo_node.host import traffic
from echo_node.host.traffic import TrafficMeter
from echo_node.host.trouble_log import TroubleLog
from tests.small_disk import mounted, needs_mounts


def test_counts_are_kept_over_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    days = [date(2026, 1, 31)]
    monkeypatch.setattr(traffic, "_today", lambda: days[-1])
    meter = TrafficMeter(tmp_path / "traffic.json", TroubleLog())
    meter.count(sent=3, received=4)
    days.append(date(2026, 2, 1))
    meter.count(received=5)
    meter.save()
    days.append(date(2026, 1, 31))
    again = TrafficMeter(tmp_path / "traffic.json", TroubleLog())
    assert again.now() == Traffic(day=Amount(3, 4), month=Amount(3, 4))
    days.append(date(2026, 2, 2))
    assert again.now() == Traffic(day=Amount(), month=Amount(0, 5))


DAMAGED = ["", "[]", "{", '{"2026-13-01": [1, 2]}', '{"2026-01-01": 7}', '{"2026-01-01": ["a", 1]}']


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_file_is_reported_and_replaced(tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "traffic.json").write_text(text)
    meter = TrafficMeter(tmp_path / "traffic.json", TroubleLog())
    assert meter.now().month == Amount() and "restarts at zero" in caplog.text


async def test_the_swarms_traffic_is_added_as_it_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic, "SAVE_S", 0.0)
    meter, grown, asked = TrafficMeter(tmp_path / "traffic.json", TroubleLog()), [(10, 100)], asyncio.Event()

    class Swarm:
        async def traffic(self) -> tuple[int, int]:
            asked.set()
            return grown[-1]

    task = asyncio.create_task(meter.run(Swarm()))
    for total in ((10, 100), (10, 100), (15, 250)):
        grown.append(total)
        for _ in range(2):
            asked.clear()
            await asked.wait()
    task.cancel()
    await asyncio.wait({task})
    assert meter.now().day == Amount(15, 250)
    assert TrafficMeter(tmp_path / "traffic.json", TroubleLog()).now().day == Amount(15, 250)


@needs_mounts
def test_a_full_disk_costs_no_count(tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", 64 * 1024) as disk:
        troubles = TroubleLog()
        disk.fill()
        meter = TrafficMeter(disk.directory / "traffic.json", troubles)
        meter.count(sent=7)
        meter.save()
        assert [trouble.code for trouble in troubles.now] == [TroubleCode.DISK_FULL]
        disk.empty()
        meter.save()
        assert troubles.now == () and TrafficMeter(disk.directory / "traffic.json", troubles).now().day == Amount(7, 0)


@pytest.mark.skipif(sys.platform == "win32", reason="Windows kills otherwise")
def test_a_process_that_is_killed_leaves_a_file_that_is_whole(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from echo_node.host.traffic import TrafficMeter\n"
        "from echo_node.host.trouble_log import TroubleLog\n"
        "meter = TrafficMeter(Path(sys.argv[1]), TroubleLog())\n"
        "for number in range(10**9):\n"
        "    meter.count(sent=1); meter.save(); print(number + 1, flush=True)\n"
    )
    file = tmp_path / "traffic.json"
    with subprocess.Popen([sys.executable, "-c", program, str(file)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(20)]
        process.send_signal(signal.SIGKILL)
    assert TrafficMeter(file, TroubleLog()).now().month.sent >= int(told[-1])
