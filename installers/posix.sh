# What the Linux and the macOS installers share; sourced, never run. Everything happens in the user's own home, as the
# user: no root, no system files. The caller sets:
#   installers      the folder this file lies in
#   home_dir        where the installer puts all that it makes
#   data_dir        where echo-node keeps its key and its files, unless ECHO_NODE_HOME says otherwise
#   config_dir      where echo-node looks for its settings
#   service_dir     where `echo-node service install` puts its files
#   detected_extra  the optional dependencies that fit this machine's hardware
#   python_hint     how to get Python here
#   compiler_hint   how to get a C++ compiler here
# shellcheck shell=sh disable=SC2154

bin_dir=$HOME/.local/bin
link=$bin_dir/echo-node
environment=$home_dir/venv
made_directories=$home_dir/made-directories

say() { printf '%s\n' "$*"; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

find_python() {
    for candidate in ${python:-python3 python3.13 python3.12 python3.11 python3.14 python}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

check_compiler() {
    case $extra in *cpu*) ;; *) return ;; esac
    command -v c++ >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || command -v clang++ >/dev/null 2>&1 ||
        fail "A C++ compiler is needed: llama-cpp-python, the engine for CPUs, is compiled here. $compiler_hint"
}

# The directories that Echo's files lie in without being Echo's alone, children before their parents.
shared_directories() {
    for path in "$bin_dir/x" "$service_dir/x" "$home_dir" "$data_dir" "$config_dir"; do
        path=${path%/*}
        while [ -n "$path" ] && [ "$path" != "$HOME" ]; do
            printf '%s\n' "$path"
            path=${path%/*}
        done
    done | sort -ru
}

# Notes which of them do not exist yet: uninstalling takes those away again, once they are empty.
make_directories() {
    missing=$(shared_directories | while read -r path; do [ -d "$path" ] || printf '%s\n' "$path"; done)
    mkdir -p "$home_dir" "$bin_dir"
    [ -e "$made_directories" ] || printf '%s\n' "$missing" >"$made_directories"
}

make_environment() {
    if [ -d "$environment" ] && ! "$environment/bin/python" -c 'import pip' 2>/dev/null; then
        rm -rf "$environment"
    fi
    if [ ! -d "$environment" ]; then
        say "Making an environment with $interpreter in $environment"
        "$interpreter" -m venv "$environment" || {
            rm -rf "$environment"
            fail "Python's venv module does not work. $python_hint"
        }
    fi
}

install_package() {
    set -- --upgrade --disable-pip-version-check
    [ ! -f "$source/constraints.txt" ] || set -- "$@" -c "$source/constraints.txt"
    # llama.cpp joins several machines only if it is compiled with RPC.
    export CMAKE_ARGS="-DGGML_RPC=ON${CMAKE_ARGS:+ $CMAKE_ARGS}"
    say "Installing $source${extra:+ with [$extra]}; this can take minutes"
    "$environment/bin/python" -m pip install "$@" "$source${extra:+[$extra]}"
    case $source in # pip leaves a wheel of the same version as it is, unless it is told
        *.whl) "$environment/bin/python" -m pip install --quiet --force-reinstall --no-deps "$source" ;;
    esac
    shift 2 # the constraints are left
    "$installers/llama_with_rpc.sh" "$environment/bin/python" "$@"
}

is_our_link() {
    [ -L "$link" ] && [ "$(readlink "$link")" = "$environment/bin/echo-node" ]
}

check_link() {
    [ ! -e "$link" ] || is_our_link || fail "$link is there already and is not Echo's. Move it away, then start again."
}

make_link() {
    ln -sf "$environment/bin/echo-node" "$link"
    case :$PATH: in
        *:"$bin_dir":*) ;;
        *) say "Note: $bin_dir is not on your PATH; until it is, type $link" ;;
    esac
}

install_usage() {
    cat <<EOF
usage: install.sh [--source SOURCE] [--extra EXTRA] [--python PYTHON]
                  [--join URL [--token TOKEN] [--insecure] [--service]]

Installs echo-node for this user, or upgrades it: an environment of its own in
  $home_dir
and a link to its command, $link. uninstall.sh removes both.

  --source SOURCE  what to install: a checkout or a wheel; default: the checkout this script lies in
  --extra EXTRA    cpu (llama.cpp), cuda (PyTorch), mlx (Apple silicon), vllm (big CUDA GPUs) or none;
                   several with commas; default: by hardware, here $detected_extra
  --python PYTHON  the interpreter to use, 3.11 or newer
  --join URL       join this hub afterwards, with --token TOKEN if the hub asks for an invitation
  --insecure       with --join: allow http:// to another machine, in a network that you trust
  --service        with --join: run in the background from now on, whenever you are logged in
EOF
}

read_install_options() {
    source='' extra=$detected_extra python='' url='' token='' insecure='' service=no
    [ ! -f "$installers/../pyproject.toml" ] || source=$(cd "$installers/.." && pwd)
    while [ $# -gt 0 ]; do
        case $1 in
            --source | --extra | --python | --join | --token) [ $# -ge 2 ] || fail "$1 needs a value; see --help" ;;
        esac
        case $1 in
            --source) source=$2 && shift ;;
            --extra) extra=$2 && shift ;;
            --python) python=$2 && shift ;;
            --join) url=$2 && shift ;;
            --token) token=$2 && shift ;;
            --insecure) insecure=yes ;;
            --service) service=yes ;;
            -h | --help) install_usage && exit ;;
            *) fail "There is no option $1; see --help" ;;
        esac
        shift
    done
    [ "$extra" != none ] || extra=''
    [ -n "$url" ] || [ "$service$token$insecure" = no ] || fail "--token, --insecure and --service go with --join URL."
    [ -n "$source" ] || fail "Say what to install: --source DIR or WHEEL."
    # Never a package's name: anybody may have taken Echo's on an index.
    [ -e "$source" ] || fail "$source does not exist (--source)."
    source=$(cd "$(dirname "$source")" && pwd)/$(basename "$source") # absolute, lest pip take it for a name
}

install_main() {
    read_install_options "$@"
    interpreter=$(find_python) || fail "Python 3.11 or newer is needed${python:+, and $python is not}. $python_hint"
    check_compiler
    check_link
    make_directories
    # Compiled wheels are kept beside the environment for the next upgrade, so that nothing is left in ~/.cache.
    export PIP_CACHE_DIR="${PIP_CACHE_DIR:-$home_dir/pip-cache}"
    make_environment
    install_package
    make_link
    say "Installed $("$environment/bin/python" -m pip list --disable-pip-version-check | grep '^echo-swarm '): $link"
    join_hub
}

# The service takes up the hub that was joined last, so the node joins once by itself before it is installed.
join_then_serve() {
    "$link" join "$@" --quiet &
    joining=$!
    until "$link" status --json 2>/dev/null | grep -q '"connected": true'; do
        kill -0 "$joining" 2>/dev/null || { wait "$joining" && break || exit; }
        sleep 1
    done
    kill "$joining" 2>/dev/null || true
    wait "$joining" || true
    "$link" service install
}

join_hub() {
    set -- "$url" ${token:+--token "$token"} ${insecure:+--insecure}
    if [ -z "$url" ]; then
        say "Next: echo-node join URL"
    elif [ "$service" = yes ]; then
        join_then_serve "$@"
    else
        say "Joining $url. Ctrl-C stops; echo-node run goes on with it."
        exec "$link" join "$@"
    fi
}

stop_node() {
    if [ -x "$environment/bin/echo-node" ]; then
        "$environment/bin/echo-node" service uninstall || say "Note: the service could not be asked to stop."
        [ ! -e "$data_dir/control.json" ] || "$environment/bin/echo-node" leave --force ||
            say "Note: the node could not be asked to stop."
    fi
}

remove_data() {
    [ "$config_dir" = "$data_dir" ] || rm -rf "$config_dir"
    if [ "$keep_identity" = yes ] && [ -f "$data_dir/identity.key" ]; then
        find "$data_dir" -mindepth 1 -maxdepth 1 ! -name identity.key -exec rm -rf {} +
        say "Kept the node's key: $data_dir/identity.key"
    else
        rm -rf "$data_dir"
    fi
    [ -z "${ECHO_NODE_HOME:-}" ] || say "Left as it is: $ECHO_NODE_HOME (ECHO_NODE_HOME)"
}

uninstall_main() {
    keep_identity=no
    for option; do
        case $option in
            --keep-identity) keep_identity=yes ;;
            *)
                say "usage: uninstall.sh [--keep-identity]"
                say "Stops echo-node and removes $home_dir, $data_dir, $config_dir and $link."
                say "--keep-identity leaves the node's key, $data_dir/identity.key"
                case $option in -h | --help) exit ;; *) exit 1 ;; esac
                ;;
        esac
    done
    stop_node
    ! is_our_link || rm "$link"
    remove_data
    made=$(cat "$made_directories" 2>/dev/null || true)
    rm -rf "$home_dir"
    printf '%s\n' "$made" | while read -r path; do
        [ -z "$path" ] || rmdir "$path" 2>/dev/null || true
    done
    say "Removed echo-node."
}
