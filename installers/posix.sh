# Common part of the Linux and macOS installers; sourced, never run. It runs as the user and only writes to the user's
# home: no root, no system files. The caller sets:
#   installers      the folder of this file
#   home_dir        the installer's own folder
#   data_dir        echo-node's folder for its key and files, unless ECHO_NODE_HOME is set
#   config_dir      echo-node's folder for settings
#   service_dir     folder for the files of `echo-node service install`
#   service_file    file that exists if the service is installed
#   detected_extra  the optional dependencies that fit this machine's hardware
#   python_hint     how to get Python here
#   compiler_hint   how to get a C++ compiler here
#   unsupported     reason and advice if a checkout cannot be installed on this machine
#   pins_edit       a sed command that changes the pins in constraints.txt that have no build for this machine
# Each installation has its own environment below versions/; the link `current` selects one. The link is switched
# atomically, after the new environment has proven that it starts.
# shellcheck shell=sh disable=SC2154

bin_dir=$HOME/.local/bin
link=$bin_dir/echo-node
versions=$home_dir/versions
current=$home_dir/current
made_directories=$home_dir/made-directories
# Files of `echo-node --install-completion`, by shell.
bash_completion=$HOME/.bash_completions/echo-node.sh
zsh_completion=$HOME/.zfunc/_echo-node
fish_completion=$HOME/.config/fish/completions/echo-node.fish
installing='' new='' scratch='' temporary=''
START_S=60

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
    case $extra in *cpu*) ;; *) return 0 ;; esac
    command -v c++ >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || command -v clang++ >/dev/null 2>&1 ||
        fail "A C++ compiler is needed to compile llama-cpp-python, the engine for CPUs. $compiler_hint"
}

# Directories that contain Echo's files but may be shared with other programs, children before parents.
shared_directories() {
    for path in "$bin_dir/x" "$service_dir/x" "$home_dir" "$data_dir" "$config_dir" \
        "$bash_completion" "$zsh_completion" "$fish_completion"; do
        path=${path%/*}
        while [ -n "$path" ] && [ "$path" != "$HOME" ]; do
            printf '%s\n' "$path"
            path=${path%/*}
        done
    done | sort -ru
}

# Records which shared directories do not exist yet. Uninstalling removes these directories once they are empty.
make_directories() {
    missing=$(shared_directories | while read -r path; do [ -d "$path" ] || printf '%s\n' "$path"; done)
    mkdir -p "$home_dir" "$bin_dir"
    [ -e "$made_directories" ] || printf '%s\n' "$missing" >"$made_directories"
}

# Restores the previous state if the installation ends early.
tidy() {
    [ -z "$new" ] || rm -rf "$new"
    [ -z "$scratch" ] || rm -rf "$scratch"
    [ -z "$temporary" ] || rm -rf "$temporary"
    [ "$installing" != yes ] || [ -e "$current" ] || remove_home
}

# Opens the wheelhouse $from: sets `wheelhouse` to a directory whose files all match its manifest, `interpreter` to a
# Python that it fits, and `requirements` to its requirements file for this Python.
open_wheelhouse() {
    scratch=$(mktemp -d)
    wheelhouse=$("$interpreter" "$installers/wheelhouse.py" open "$from" "$scratch" ${insecure:+--insecure}) || exit 1
    chosen=''
    for candidate in "$interpreter" ${python:-python3.13 python3.12 python3.11}; do
        if "$candidate" "$installers/wheelhouse.py" requirements "$wheelhouse" >/dev/null 2>&1; then
            chosen=$(command -v "$candidate") && break
        fi
    done
    [ -n "$chosen" ] || { "$interpreter" "$installers/wheelhouse.py" requirements "$wheelhouse" || exit 1; }
    interpreter=$chosen
    requirements=$("$interpreter" "$installers/wheelhouse.py" requirements "$wheelhouse")
    identity=$(cksum <"$wheelhouse/manifest.json")
}

# The wheelhouse's own pip installs its wheels by hash, without index, network or compiler.
install_wheelhouse() {
    say "Installing from $from with $interpreter"
    "$interpreter" -m venv --without-pip "$new"
    set -- "$wheelhouse"/wheels/pip-*.whl
    "$new/bin/python" "$1/pip" --isolated install --quiet --disable-pip-version-check --no-index --no-cache-dir \
        --find-links "$wheelhouse/wheels" --only-binary :all: --require-hashes -r "$requirements"
    cp -R "$wheelhouse/installers" "$new/installers"
    printf '%s\n' "$identity" >"$new/wheelhouse"
}

install_source() {
    check_compiler
    "$interpreter" -m venv "$new" || fail "Python's venv module does not work. $python_hint"
    # Compiled wheels are cached next to the environment for the next upgrade, so that ~/.cache stays clean.
    export PIP_CACHE_DIR="${PIP_CACHE_DIR:-$home_dir/pip-cache}"
    set --
    if [ -f "$source/constraints.txt" ]; then
        sed -e "${pins_edit:-}" "$source/constraints.txt" >"$new/constraints.txt"
        set -- -c "$new/constraints.txt"
    fi
    # llama.cpp needs RPC to span several machines.
    export CMAKE_ARGS="-DGGML_RPC=ON${CMAKE_ARGS:+ $CMAKE_ARGS}"
    say "Installing $source${extra:+ with [$extra]}; this can take minutes"
    "$new/bin/python" -m pip install --disable-pip-version-check "$@" "$source${extra:+[$extra]}"
    "$installers/llama_with_rpc.sh" "$new/bin/python" "$@"
    cp -R "$installers" "$new/installers"
}

# Notes the source and the options in the environment $1. With `update = "auto"`, a node later passes them to this
# installer (echo_node/host/installed_copy.py). An installation from a hub notes only its origin, because updates from a
# hub are never automatic.
note_source() {
    if [ -n "$temporary" ]; then
        set -- "$1" hub ''
    elif [ -n "$from" ]; then
        set -- "$1" wheelhouse "$from" ${python:+--python "$python"} ${insecure:+--insecure}
    else
        set -- "$1" source "$source"
    fi
    XDG_DATA_HOME=${XDG_DATA_HOME:-$HOME/.local/share} XDG_CONFIG_HOME=${XDG_CONFIG_HOME:-$HOME/.config} \
        "$1/bin/python" -I -c '
import json, os, sys
place, origin, source, *options = sys.argv[1:]
environment = {name: os.environ[name] for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME")}
noted = {"origin": origin, "source": source, "options": options, "environment": environment}
with open(place + "/source.json.new", "w", encoding="utf-8") as file:
    json.dump(noted, file)
os.replace(file.name, place + "/source.json")
' "$@"
}

# Succeeds if the environment $1 works: the command starts, and the engine's library loads on this processor.
starts() {
    "$1/bin/echo-node" --help >/dev/null && "$1/bin/python" -I -c '
import importlib.util
import echo_node.main
if importlib.util.find_spec("llama_cpp"):
    import llama_cpp
    from echo_shared.gguf.llama_cpp_devices import load_devices
    load_devices()
    llama_cpp.llama_backend_init()
'
}

# Switches `current` atomically to the environment named $1.
switch_to() {
    rm -f "$current.new"
    ln -s "versions/$1" "$current.new"
    "$versions/$1/bin/python" -c 'import os, sys; os.replace(*sys.argv[1:])' "$current.new" "$current"
}

node_answers() { "$link" status --json >/dev/null 2>&1; }

# Restarts a running service with the new version; restores the old version if that fails.
restart_service() { # PREVIOUS_VERSION
    [ -f "$service_file" ] || return 0
    say "Restarting the service"
    if "$link" service install; then
        waited=0
        until node_answers; do
            [ "$waited" -lt "$START_S" ] || break
            sleep 1
            waited=$((waited + 1))
        done
        if node_answers; then return; fi
    fi
    [ -n "$1" ] || fail "The service does not start. To see its state: $link service status"
    new=$versions/$(readlink "$current" | sed 's,.*/,,') # `tidy` removes this version
    switch_to "$1"
    "$link" service install || say "Note: the service of the previous version could not be restarted."
    fail "The new version does not start as a service. The previous version was restored."
}

is_installed() {
    [ -n "$from" ] && [ -f "$current/wheelhouse" ] && [ "$(cat "$current/wheelhouse")" = "$identity" ] &&
        starts "$current" 2>/dev/null
}

# Removes all environments except the current one and the one named $1.
remove_others() {
    used=$(readlink "$current" | sed 's,.*/,,')
    for path in "$versions"/*; do
        case ${path##*/} in "$used" | "${1:-$used}") ;; *) rm -rf "$path" ;; esac
    done
}

install_version() {
    before=''
    [ ! -L "$current" ] || before=$(readlink "$current" | sed 's,.*/,,')
    was_running=''
    [ ! -e "$link" ] || ! node_answers || was_running=yes
    mkdir -p "$versions"
    new=$(mktemp -d "$versions/$(date +%Y%m%d).XXXXXX")
    if [ -n "$from" ]; then install_wheelhouse; else install_source; fi
    said=$(starts "$new" 2>&1) || {
        say "$said"
        fail "The new version does not start on this machine${before:+; the previous version stays in use}."
    }
    note_source "$new"
    made=${new##*/}
    new=''
    switch_to "$made"
    make_link
    restart_service "$before"
    if [ -n "$running" ]; then
        remove_others "$before" # the node that runs this installer still needs these files
    elif [ -n "$was_running" ] && [ ! -f "$service_file" ]; then
        say "Note: a node is running. It uses the new version after its next start."
        remove_others "$before" # the running node still needs these files
    else
        remove_others
    fi
}

is_our_link() {
    case $([ ! -L "$link" ] || readlink "$link") in "$home_dir"/*) ;; *) return 1 ;; esac
}

check_link() {
    { [ ! -e "$link" ] && [ ! -L "$link" ]; } || is_our_link ||
        fail "$link exists already and does not belong to Echo. Move it away, then run the installer again."
}

make_link() {
    ln -sf "$current/bin/echo-node" "$link"
    case :$PATH: in
        *:"$bin_dir":*) ;;
        *) say "Note: $bin_dir is not on your PATH; until it is, type $link" ;;
    esac
}

install_usage() {
    cat <<EOF
usage: install.sh [--from WHEELHOUSE | --source SOURCE] [--extra EXTRA] [--python PYTHON]
                  [--join URL [--token TOKEN] [--insecure] [--service]]

Installs or upgrades echo-node for this user: creates an environment in
  $home_dir
and a link to its command, $link. uninstall.sh removes both.

  --from WHEELHOUSE  output of \`make wheelhouse\`, as a directory, an archive or a URL (https; it may end in
                   #sha256=HEX); nothing is compiled or downloaded from elsewhere
  --source SOURCE  install a checkout or a wheel instead; default: the checkout of this script
  --extra EXTRA    cpu (llama.cpp), cuda (PyTorch), mlx (Apple silicon), vllm (big CUDA GPUs) or none;
                   several with commas; default: by hardware, here $detected_extra
  --python PYTHON  the interpreter to use, 3.11 or newer
  --join URL       join this hub afterwards, with --token TOKEN if the hub asks for an invitation
  --insecure       allow http:// to another machine, in a network that you trust
  --service        with --join: run in the background whenever you are logged in
EOF
}

read_install_options() {
    from='' source='' extra='' python='' url='' token='' insecure='' service=no running=''
    while [ $# -gt 0 ]; do
        case $1 in
            --from | --temporary | --source | --extra | --python | --join | --token)
                [ $# -ge 2 ] || fail "$1 needs a value; see --help"
                ;;
        esac
        case $1 in
            --from) from=$2 && shift ;;
            --temporary) temporary=$2 && shift ;; # from_hub.sh's folder; deleted after the installation
            --source) source=$2 && shift ;;
            --extra) extra=$2 && shift ;;
            --python) python=$2 && shift ;;
            --join) url=$2 && shift ;;
            --token) token=$2 && shift ;;
            --insecure) insecure=yes ;;
            --service) service=yes ;;
            --running) running=yes ;; # passed by a node that updates itself
            -h | --help) install_usage && exit ;;
            *) fail "There is no option $1; see --help" ;;
        esac
        shift
    done
    [ -n "$url" ] || [ "$service$token" = no ] || fail "--token and --service need --join URL."
    [ -z "$from" ] || [ -z "$source$extra" ] || fail "--from WHEELHOUSE cannot be combined with --source or --extra."
    if [ -z "$from$source" ]; then
        here=$(cd "$installers/.." && pwd)
        if [ -f "$here/manifest.json" ]; then from=$here; elif [ -f "$here/pyproject.toml" ]; then source=$here; fi
    fi
    case $from in '' | *://*) ;; /*) ;; *) from=$PWD/$from ;; esac
    [ -z "$from" ] || return 0
    [ -z "$insecure" ] || [ -n "$url" ] || fail "--insecure needs --join URL or --from URL."
    extra=${extra:-$detected_extra}
    [ "$extra" != none ] || extra=''
    [ -n "$source" ] || fail "There is nothing to install: give --from WHEELHOUSE, or --source DIR or WHEEL."
    # A package name is refused, because Echo's name on an index may belong to anyone.
    [ -e "$source" ] || fail "$source does not exist (--source)."
    source=$(cd "$(dirname "$source")" && pwd)/$(basename "$source") # absolute, or pip would take it for a package name
}

install_main() {
    trap tidy EXIT
    trap 'exit 130' INT TERM
    read_install_options "$@"
    interpreter=$(find_python) || fail "Python 3.11 or newer is needed${python:+, and $python is not}. $python_hint"
    check_link
    [ -n "$from" ] || [ -z "${unsupported:-}" ] || fail "$unsupported"
    [ -z "$from" ] || open_wheelhouse
    make_directories
    installing=yes
    if [ -n "$from" ] && is_installed; then
        say "This version is already installed: $link"
        note_source "$current"
        make_link
    else
        install_version
        say "Installed: $link"
    fi
    say "To remove it: $current/installers/$(basename "$(dirname "$0")")/uninstall.sh"
    installing=''
    tidy
    trap - EXIT INT TERM
    join_hub
}

# The service uses the hub that was joined last, so the node joins once before the service is installed.
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

# Leaves a running node at its present hub, and explains to its owner how to move it to $url.
say_running() { # JOIN_ARGUMENT...
    hub=$("$link" status --json | "$current/bin/python" -I -c 'import json, sys; print(json.load(sys.stdin)["hub"])')
    say "A node is already running on this machine. It still works for $hub. To see its state: echo-node status"
    case $url/ in
        "$hub"/*)
            [ "$service" = no ] || [ -f "$service_file" ] ||
                say "To run it as a service: echo-node finish; when it has stopped: echo-node service install"
            return
            ;;
    esac
    say "The node has not joined $url. To change that, first let it finish its work and stop: echo-node finish"
    say "  then, to work for $url only: echo-node join $*"
    say "  or, to work for both hubs in turns: echo-node join $* --share 1"
    if [ "$service" = yes ] || [ -f "$service_file" ]; then
        say "Once the node is connected, press Ctrl-C, and run it in the background: echo-node service install"
    fi
}

join_hub() {
    set -- "$url" ${token:+--token "$token"} ${insecure:+--insecure}
    if [ -z "$url" ]; then
        say "Next: echo-node join URL"
    elif node_answers; then
        say_running "$@"
    elif [ "$service" = yes ]; then
        join_then_serve "$@"
    else
        say "Joining $url. Ctrl-C stops the node; echo-node run starts it again."
        exec "$link" join "$@"
    fi
}

stop_node() {
    if [ -x "$current/bin/echo-node" ]; then
        "$current/bin/echo-node" service uninstall || say "Note: the service could not be stopped."
        [ ! -e "$data_dir/control.json" ] || "$current/bin/echo-node" leave --force ||
            say "Note: the node could not be stopped."
    fi
}

# Removes everything that the installer created, and the directories it created if they are empty.
remove_home() {
    made=$(cat "$made_directories" 2>/dev/null || true)
    rm -rf "$home_dir"
    printf '%s\n' "$made" | while read -r path; do
        [ -z "$path" ] || rmdir "$path" 2>/dev/null || true
    done
}

# Removes the completion files, and the line in ~/.bashrc that loads bash's.
remove_completion() {
    rm -f "$bash_completion" "$zsh_completion" "$fish_completion"
    if grep -qxF "source '$bash_completion'" "$HOME/.bashrc" 2>/dev/null; then
        ours="source '$(printf '%s\n' "$bash_completion" | sed 's,[][\.*^$/],\\&,g')'"
        left=$(sed -e '/^$/{$!N' -e "/^\\n$ours\$/d" -e 'P' -e 'D' -e '}' -e "/^$ours\$/d" "$HOME/.bashrc" && echo .)
        # Overwrite the file instead of moving a new one into its place, because it may be a link.
        if [ "$left" = . ]; then rm "$HOME/.bashrc"; else printf '%s' "${left%.}" >"$HOME/.bashrc"; fi
    fi
    # The lines in ~/.zshrc may serve other programs; they are removed only if the file has no others.
    found='^fpath+=~/\.zfunc; autoload -Uz compinit; compinit$'
    if grep -q "$found" "$HOME/.zshrc" 2>/dev/null && [ -z "$(find "${zsh_completion%/*}" -type f 2>/dev/null)" ] &&
        ! grep -qv -e '^$' -e "$found" -e "^zstyle ':completion:\*' menu select\$" "$HOME/.zshrc"; then
        rm "$HOME/.zshrc"
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
    [ -z "${ECHO_NODE_HOME:-}" ] || say "Not removed: $ECHO_NODE_HOME, the directory in ECHO_NODE_HOME"
}

uninstall_main() {
    keep_identity=no
    for option; do
        case $option in
            --keep-identity) keep_identity=yes ;;
            *)
                say "usage: uninstall.sh [--keep-identity]"
                say "Stops echo-node and removes $home_dir, $data_dir, $config_dir, $link and its completion in shells."
                say "--keep-identity leaves the node's key, $data_dir/identity.key"
                case $option in -h | --help) exit ;; *) exit 1 ;; esac
                ;;
        esac
    done
    stop_node
    ! is_our_link || rm "$link"
    remove_completion
    remove_data
    remove_home
    say "Removed echo-node."
}
