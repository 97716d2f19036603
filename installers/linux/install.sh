#!/bin/sh
# Installs or upgrades echo-node on Linux for the current user. See `install.sh --help`.
set -eu
installers=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source-path=SCRIPTDIR source=settings.sh
. "$installers/linux/settings.sh"
# shellcheck source-path=SCRIPTDIR source=../posix.sh
. "$installers/posix.sh"
install_main "$@"
