"""The text of the Windows scripts, and their syntax if this machine has PowerShell."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest
from typer._completion_shared import get_completion_script

INSTALLERS = Path(__file__).resolve().parents[2] / "installers"
SCRIPTS = sorted(INSTALLERS.rglob("*.ps1"))
PWSH = shutil.which("pwsh") or shutil.which("powershell")


def parameters(script: Path) -> set[str]:
    text = script.read_text(encoding="utf-8")
    block = text[text.index("\nparam(") : text.index("\n)\n")]
    return set(re.findall(r"^    \[.*\] \$(\w+)", block, re.MULTILINE))


@pytest.mark.skipif(PWSH is None, reason="no PowerShell here")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_powershell_can_parse_each_script(script: Path) -> None:
    parse = f"[Management.Automation.Language.Parser]::ParseFile('{script}', [ref] $null, [ref] $errors)"
    command = f"$errors = $null; {parse} | Out-Null; $errors | Out-String; exit $errors.Count"
    done = subprocess.run([str(PWSH), "-NoProfile", "-Command", command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_ascii_for_every_powershell(script: Path) -> None:
    assert script.read_bytes().isascii()


def test_the_installer_accepts_the_served_scripts_arguments(opener: ModuleType, tmp_path: Path) -> None:
    text = (INSTALLERS / "from_hub.ps1").read_text(encoding="utf-8")
    passed = re.findall(r"'-([A-Z]\w+)'", text)
    assert set(passed) == {"From", "Temporary", "Join", "Token", "Python", "Insecure", "Service"}
    assert set(passed) <= parameters(INSTALLERS / "windows" / "install.ps1")
    assert parameters(INSTALLERS / "from_hub.ps1") == set(passed) - {"From", "Temporary"}
    opened = re.search(r"\$options = @\('open', .*?, \$scratch, '(--\w+)', \$sha256\)", text)
    added = re.search(r"\$options \+= '(--\w+)'", text)
    assert opened is not None and added is not None
    command = ["open", str(tmp_path / "nothing"), str(tmp_path), opened[1], "0" * 64, added[1]]
    assert opener.main(command) == 1, "refused because of the missing archive, not because of its arguments"


def test_the_served_script_requests_the_hubs_own_paths() -> None:
    text = (INSTALLERS / "from_hub.ps1").read_text(encoding="utf-8")
    assert '"$hub/install/$sha256/$name"' in text
    assert "irm HUB/install.ps1" in text


@pytest.mark.parametrize(("before", "after"), [("", ""), ("# mine\r\n", "$a = 1\n"), ("\xef\xbb\xbf# \xe4", "")])
@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_uninstall_removes_only_the_completion_from_a_profile(before: str, after: str, line_end: str) -> None:
    text = (INSTALLERS / "windows" / "uninstall.ps1").read_text(encoding="utf-8")
    (pattern,) = re.findall(r"^    \$pattern = '(.*)'$", text, re.MULTILINE)

    def completion(program: str) -> str:
        variable = f"_{program.replace('-', '_').upper()}_COMPLETE"
        script = get_completion_script(prog_name=program, complete_var=variable, shell="pwsh")
        return f"{script}\n".replace("\n", line_end)

    other = completion("other")
    profile = f"{before}{other}{completion('echo-node')}{other}{after}"
    assert re.sub(pattern, "", profile) == f"{before}{other}{other}{after}"
    assert re.sub(pattern, "", other) == other
