"""The shipped alerting rules, evaluated by Prometheus's promtool. tests/echo_hub/dashboard/test_metrics.py checks that
a hub serves the metrics in these rules.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

RULES = Path(__file__).parents[2] / "installers/prometheus/echo.rules.yml"
FINISHED = 'echo_run_state{state="finished"}'
PROBLEM = 'echo_problem{kind="disk"}'
DROPPED = 'echo_rollouts_total{state="dropped"}'
TRAINED = 'echo_rollouts_total{state="trained"}'
RUNNING = 'echo_run_state{state="running"}'
STEP = "echo_learner_step{}"
UP = 'up{job="echo"}'

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on this machine")


@pytest.mark.parametrize(
    ("alert", "series", "minute", "fires"),
    [
        ("EchoHubDown", {UP: "1 0 0 0 0"}, 4, True),
        ("EchoHubDown", {UP: "1 0 1 1 1"}, 4, False),
        ("EchoProblem", {PROBLEM: "1 1 1 1"}, 3, True),
        ("EchoProblem", {PROBLEM: "1 1 _ _ _ _ _ _ _ _"}, 9, False),
        ("EchoNoStep", {STEP: "5+0x90", RUNNING: "1+0x90"}, 85, True),
        ("EchoNoStep", {STEP: "5+1x90", RUNNING: "1+0x90"}, 85, False),
        ("EchoNoStep", {STEP: "5+0x90", RUNNING: "0+0x90"}, 85, False),
        ("EchoManyDropped", {DROPPED: "0+5x90", TRAINED: "0+5x90"}, 85, True),
        ("EchoManyDropped", {DROPPED: "0+1x90", TRAINED: "0+9x90"}, 85, False),
        ("EchoRunFinished", {FINISHED: "0 1"}, 1, True),
        ("EchoRunFinished", {FINISHED: "0 0"}, 1, False),
    ],
)
def test_an_alert_fires_when_it_should(
    tmp_path: Path, alert: str, series: dict[str, str], minute: int, fires: bool
) -> None:
    """`series` has one sample a minute. promtool is told to expect no alert: if one fires, it fails and prints the
    alert.
    """
    case = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": f"{minute}m", "alertname": alert, "exp_alerts": []}],
    }
    file = tmp_path / "case.yml"
    file.write_text(json.dumps({"rule_files": [str(RULES)], "evaluation_interval": "1m", "tests": [case]}))
    done = subprocess.run(["promtool", "test", "rules", str(file)], capture_output=True, text=True, timeout=60)
    said = done.stdout + done.stderr
    assert (done.returncode, f'alertname="{alert}"' in said) == (int(fires), fires), said


def test_the_rules_are_valid() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(RULES)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
