#!/bin/sh
# Installs or upgrades echo-node for the current user, and joins the hub that serves this script:
#     curl -fsSL HUB/install.sh | sh -s -- --join HUB [--token TOKEN] [--service]
# You install a program that this hub's operator built, so only do this if you trust the operator. The script checks the
# program against the hashes below before it runs any part of it. Later the hub only sends numbers and model files; none
# of them is executed. The same command upgrades.
set -eu

archives() {
    cat <<'ARCHIVES'
@ARCHIVES@
ARCHIVES
}

wheelhouse() { # COMMAND ARGUMENT...
    "$interpreter" - "$@" <<'WHEELHOUSE'
@WHEELHOUSE@
WHEELHOUSE
}

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

find_python() {
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null </dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

hub_of() {
    while [ $# -gt 0 ]; do
        case $1 in
            --join) [ $# -ge 2 ] && printf '%s\n' "${2%/}" && return ;;
        esac
        shift
    done
}

main() {
    hub=$(hub_of "$@")
    [ -n "$hub" ] || fail "The hub's address is missing: curl -fsSL HUB/install.sh | sh -s -- --join HUB"
    interpreter=$(find_python) || fail "Python 3.11 or newer is needed. For example: sudo apt install python3"
    platform=$(wheelhouse platform)
    archive=$(archives | grep "^$platform ") ||
        fail "This hub offers no installation for $platform. Install from the source, then: echo-node join $hub"
    rest=${archive#* }
    insecure=''
    case " $* " in *" --insecure "*) insecure=--insecure ;; esac
    scratch=$(mktemp -d)
    trap 'rm -rf "$scratch"' EXIT
    trap 'exit 130' INT TERM
    printf 'Fetching %s from %s\n' "${rest#* }" "$hub"
    opened=$(wheelhouse open "$hub/install/${rest%% *}/${rest#* }" "$scratch" --sha256 "${rest%% *}" $insecure)
    case $platform in darwin-*) system=macos ;; *) system=linux ;; esac
    "$opened/installers/$system/install.sh" --from "$opened" --temporary "$scratch" "$@" </dev/null
}

main "$@" # On the last line, so that an incomplete download runs nothing.
