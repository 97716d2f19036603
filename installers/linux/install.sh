#!/bin/sh
# Installs echo-node on Linux for the user who runs it, or upgrades it. `install.sh --help` says more.
set -eu
installers=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source-path=SCRIPTDIR source=settings.sh
. "$installers/linux/settings.sh"
# shellcheck source-path=SCRIPTDIR source=../posix.sh
. "$installers/posix.sh"
install_main "$@"
