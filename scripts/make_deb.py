"""Makes a Debian package of the node out of a wheelhouse for Linux: `python scripts/make_deb.py [--out DIRECTORY]`.

The package carries the wheelhouse. When it is installed, it makes an environment of it in /opt/echo-node, offline and
by the wheels' hashes, with the Python that is there; an upgrade that fails brings back what was there. Its systemd
*user* unit is off: a machine with the package lends nothing until one of its users joins a hub and turns the unit on.
What users keep in their homes is theirs, and stays. Runs in an environment with Echo, and needs dpkg-deb.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated, Final

import typer

from echo_node.host.service import UNIT, systemd_unit

ROOT: Final = Path(__file__).resolve().parents[1]
ARCHITECTURES: Final = {"linux-x86_64": "amd64", "linux-aarch64": "arm64"}
CARRIED: Final = Path("usr", "share", "echo-node", "wheelhouse")
PLACE: Final = "/opt/echo-node"

CONTROL: Final = """\
Package: echo-node
Version: {release}
Architecture: {architecture}
Maintainer: Echo <echo@localhost>
Section: science
Priority: optional
Depends: python3 (>= {oldest}), python3 (<< {too_new}), libc6 (>= {glibc}), libstdc++6
Description: lends this computer to train language models
 Nothing is lent before a user joins a hub: echo-node join URL
"""

POSTINST: Final = f"""\
#!/bin/sh
set -e
[ "$1" = configure ] || exit 0
house=/{CARRIED}
give_up() {{
    rm -rf {PLACE}
    [ ! -d {PLACE}.before ] || mv {PLACE}.before {PLACE}
}}
trap give_up EXIT
rm -rf {PLACE}.before
[ ! -d {PLACE} ] || mv {PLACE} {PLACE}.before
requirements=$(python3 "$house/installers/wheelhouse.py" requirements "$house")
python3 -m venv --without-pip {PLACE}
set -- "$house"/wheels/pip-*.whl
{PLACE}/bin/python "$1/pip" --isolated install --quiet --disable-pip-version-check --no-index --no-cache-dir \\
    --root-user-action ignore --find-links "$house/wheels" --only-binary :all: --require-hashes -r "$requirements"
{PLACE}/bin/echo-node --help >/dev/null
trap - EXIT
rm -rf {PLACE}.before
"""

PRERM: Final = f"""\
#!/bin/sh
set -e
[ "$1" != remove ] || rm -rf {PLACE}
"""


def build(wheelhouse: Path, out: Path) -> Path:
    """The package. Raises KeyError for a platform that Debian does not have."""
    manifest = json.loads((wheelhouse / "manifest.json").read_text(encoding="utf-8"))
    architecture = ARCHITECTURES[manifest["platform"]]
    pythons = sorted(manifest["pythons"], key=lambda version: int(version.partition(".")[2]))
    too_new = f"3.{int(pythons[-1].partition('.')[2]) + 1}"
    control = CONTROL.format(
        release=manifest["release"],
        architecture=architecture,
        oldest=pythons[0],
        too_new=too_new,
        glibc=manifest["glibc"] or "2.28",
    )
    with tempfile.TemporaryDirectory(prefix="echo-deb-") as scratch:
        root = Path(scratch, "root")
        root.mkdir(mode=0o755)
        shutil.copytree(wheelhouse, root / CARRIED)
        _write(root / "DEBIAN" / "control", control)
        _write(root / "DEBIAN" / "postinst", POSTINST, mode=0o755)
        _write(root / "DEBIAN" / "prerm", PRERM, mode=0o755)
        unit = systemd_unit([f"{PLACE}/bin/echo-node", "run"], {}, root).content.decode()
        _write(root / "usr" / "lib" / "systemd" / "user" / UNIT, unit)
        _write(root / "usr" / "share" / "doc" / "echo-node" / "copyright", (ROOT / "LICENSE").read_text("utf-8"))
        (root / "usr" / "bin").mkdir()
        (root / "usr" / "bin" / "echo-node").symlink_to(f"{PLACE}/bin/echo-node")
        out.mkdir(parents=True, exist_ok=True)
        package = out / f"echo-node_{manifest['release']}_{architecture}.deb"
        # Wheels are compressed already.
        subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", root, package], check=True)
    return package


def _write(path: Path, text: str, *, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def main(
    wheelhouse: Annotated[Path, typer.Option(help="As `make wheelhouse` made it.")] = ROOT / "dist" / "wheelhouse",
    out: Annotated[Path, typer.Option(help="Where the package goes.")] = ROOT / "dist",
) -> None:
    """Make a Debian package of the node."""
    typer.echo(build(wheelhouse, out))


if __name__ == "__main__":
    typer.run(main)
