#!/bin/sh
# Removes everything that install.sh and echo-node created: service, environment, link, data, key. See --help.
set -eu
installers=$(cd "$(dirname "$0")/.." && pwd)
# shellcheck source-path=SCRIPTDIR source=settings.sh
. "$installers/linux/settings.sh"
# shellcheck source-path=SCRIPTDIR source=../posix.sh
. "$installers/posix.sh"
uninstall_main "$@"
