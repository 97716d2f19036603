"""Makes Debian packages of the node and of the hub, each from a wheelhouse for Linux.

    python scripts/make_deb.py          dist/echo-node_RELEASE_ARCHITECTURE.deb, from dist/wheelhouse
    python scripts/make_deb.py --hub    dist/echo-hub_RELEASE_ARCHITECTURE.deb, from dist/hub/wheelhouse

A package contains its wheelhouse. When it is installed, it creates an environment in /opt with the system's Python,
offline, from hash-checked wheels. A failed upgrade restores the previous environment. No service starts automatically.
The node's systemd *user* unit is disabled, and a machine lends nothing until one of its users joins a hub and enables
it. The hub's system unit is disabled, and has no run to serve until the operator creates one as the user `echo-hub`,
which the package adds. Removing a package keeps the users' data in their homes, and the operator's runs.

Run it in an environment with Echo's node; it needs dpkg-deb.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from echo_node.host.service import UNIT, systemd_unit
from echo_shared.errors import ConfigError, EchoError

ROOT: Final = Path(__file__).resolve().parents[1]
PARTS: Final = ROOT / "scripts" / "deb"
ARCHITECTURES: Final = {"linux-x86_64": "amd64", "linux-aarch64": "arm64"}

CONTROL: Final = """\
Package: {name}
Version: {release}
Architecture: {architecture}
Maintainer: Echo <echo@localhost>
Section: science
Priority: optional
Depends: python3 (>= {oldest}), python3 (<< {too_new}), libc6 (>= {glibc}), libstdc++6{also}
Description: {description}
"""

POSTINST: Final = """\
#!/bin/sh
set -e
[ "$1" = configure ] || exit 0
house=/{carried}
{before}\
give_up() {{
    rm -rf {place}
    [ ! -d {place}.before ] || mv {place}.before {place}
{after}\
}}
trap give_up EXIT
rm -rf {place}.before
[ ! -d {place} ] || mv {place} {place}.before
requirements=$(python3 "$house/installers/wheelhouse.py" requirements "$house")
python3 -m venv --without-pip {place}
set -- "$house"/wheels/pip-*.whl
{place}/bin/python "$1/pip" --isolated install --quiet --disable-pip-version-check --no-index --no-cache-dir \\
    --root-user-action ignore --find-links "$house/wheels" --only-binary :all: --require-hashes -r "$requirements"
{place}/bin/{name} --help >/dev/null
trap - EXIT
rm -rf {place}.before
{after}\
"""

PRERM: Final = """\
#!/bin/sh
set -e
[ "$1" = remove ] || exit 0
{stop}\
rm -rf {place}
"""

HUB_BEFORE: Final = """\
systemd-sysusers echo-hub.conf
install -d -m 0750 -o echo-hub -g echo-hub /var/lib/echo-hub
running=''
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
    if systemctl --quiet is-active echo-hub.service; then running=yes; fi
    [ -z "$running" ] || systemctl stop echo-hub.service
fi
"""

HUB_AFTER: Final = """\
    [ -z "$running" ] || systemctl start echo-hub.service
"""

HUB_STOP: Final = """\
[ ! -d /run/systemd/system ] || systemctl --quiet disable --now echo-hub.service
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """The parts in which the node's and the hub's Debian package differ."""

    name: str
    """Name of the package, and of the command that it installs."""
    extras: tuple[str, ...]
    """Extras of pyproject.toml. A wheelhouse for any single extra of these is enough to build the package."""
    description: str
    files: Mapping[str, str]
    """Files that only this package installs: path -> content."""
    also: str = ""
    """Debian packages on which this one depends, besides those of every package."""
    before: str = ""
    """Shell code that runs before the environment is replaced."""
    after: str = ""
    """Shell code that runs after the environment was replaced or restored."""
    stop: str = ""
    """Shell code that runs before the package is removed."""

    @property
    def place(self) -> str:
        return f"/opt/{self.name}"

    @property
    def carried(self) -> Path:
        return Path("usr", "share", self.name, "wheelhouse")


def node() -> Package:
    """Return the node's package, which lends the machine for each user who enables its unit."""
    unit = systemd_unit(["/opt/echo-node/bin/echo-node", "run"], {}, Path("/")).content.decode()
    return Package(
        name="echo-node",
        extras=("cpu",),
        description="lends this computer to train language models\n"
        " Nothing is lent before a user joins a hub: echo-node join URL",
        files={f"usr/lib/systemd/user/{UNIT}": unit},
    )


def hub() -> Package:
    """Return the hub's package, which serves a run as the user echo-hub."""
    return Package(
        name="echo-hub",
        extras=("hub",),
        description="trains a language model with rollouts from computers that people lend\n"
        " Nothing is served before there is a run, and the unit is on:\n"
        " sudo -u echo-hub echo-hub init /var/lib/echo-hub/run\n"
        " sudo systemctl enable --now echo-hub",
        files={
            "usr/lib/systemd/system/echo-hub.service": (PARTS / "echo-hub.service").read_text("utf-8"),
            "usr/lib/sysusers.d/echo-hub.conf": (PARTS / "echo-hub.sysusers").read_text("utf-8"),
            **{
                f"usr/share/doc/echo-hub/{page.relative_to(ROOT / 'docs')}": page.read_text("utf-8")
                for page in (ROOT / "docs" / "operator.md", *sorted((ROOT / "docs" / "operator").glob("*.md")))
            },
        },
        also=", systemd",
        before=HUB_BEFORE,
        after=HUB_AFTER,
        stop=HUB_STOP,
    )


def build(package: Package, wheelhouse: Path, out: Path) -> Path:
    """Build the package and return its path. Raises ConfigError if the wheelhouse does not suit it."""
    manifest = _manifest(package, wheelhouse)
    pythons = sorted(manifest["pythons"], key=lambda version: int(version.partition(".")[2]))
    control = CONTROL.format(
        name=package.name,
        release=manifest["release"],
        architecture=ARCHITECTURES[manifest["platform"]],
        oldest=pythons[0],
        too_new=f"3.{int(pythons[-1].partition('.')[2]) + 1}",
        glibc=manifest["glibc"] or "2.28",
        also=package.also,
        description=package.description,
    )
    with tempfile.TemporaryDirectory(prefix="echo-deb-") as scratch:
        root = Path(scratch, "root")
        root.mkdir(mode=0o755)
        shutil.copytree(wheelhouse, root / package.carried)
        _write(root / "DEBIAN" / "control", control)
        for name, script in {"postinst": POSTINST, "prerm": PRERM}.items():
            parts = {"before": package.before, "after": package.after, "stop": package.stop, "carried": package.carried}
            _write(root / "DEBIAN" / name, script.format(name=package.name, place=package.place, **parts), mode=0o755)
        for path, text in package.files.items():
            _write(root / path, text)
        _write(root / "usr/share/doc" / package.name / "copyright", (ROOT / "LICENSE").read_text("utf-8"))
        (root / "usr" / "bin").mkdir()
        (root / "usr" / "bin" / package.name).symlink_to(f"{package.place}/bin/{package.name}")
        out.mkdir(parents=True, exist_ok=True)
        made = out / f"{package.name}_{manifest['release']}_{ARCHITECTURES[manifest['platform']]}.deb"
        # No compression, because wheels are compressed.
        subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", root, made], check=True)
    return made


def _manifest(package: Package, wheelhouse: Path) -> dict[str, Any]:
    path = wheelhouse / "manifest.json"
    what = "make deb-hub" if package.name == "echo-hub" else "make deb"
    if not path.is_file():
        raise ConfigError("There is no wheelhouse here.", got=f"no {path}", do=f"Run {what}; it builds both.")
    manifest = dict(json.loads(path.read_text(encoding="utf-8")))
    platform, extra = manifest["platform"], manifest["extra"]
    if platform not in ARCHITECTURES or extra not in package.extras:
        raise ConfigError(
            f"{package.name} cannot be built from this wheelhouse.",
            got=f"{path}: for {platform}, with the extra {extra}",
            do=f"Use one for {' or '.join(ARCHITECTURES)} with {' or '.join(package.extras)}; {what} builds it.",
        )
    return manifest


def _write(path: Path, text: str, *, mode: int = 0o644) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


def main(
    is_hub: Annotated[bool, typer.Option("--hub", help="The hub's package instead of the node's.")] = False,
    wheelhouse: Annotated[
        Path | None, typer.Option(help="Default: dist/wheelhouse, for the hub dist/hub/wheelhouse.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the package goes.")] = ROOT / "dist",
) -> None:
    """Make a Debian package of the node, or of the hub."""
    chosen = wheelhouse or ROOT / "dist" / ("hub/wheelhouse" if is_hub else "wheelhouse")
    try:
        typer.echo(build(hub() if is_hub else node(), chosen, out))
    except EchoError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    typer.run(main)
