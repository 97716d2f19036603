#!/usr/bin/env bash
# Tests Echo with other versions of Python and libraries than the pinned ones, in environments below build/libraries.
#   libraries.sh newest   the newest Python on this machine and the newest libraries, without torch; then a node in
#                         this environment joins a run of the hub in VENV
#   libraries.sh lowest   the oldest Python that Echo supports, with the lowest versions that pyproject.toml allows;
#                         then VENV with the newest transformers
# Variables: VENV, the developers' environment (make env), default .venv.
set -euo pipefail
cd "$(dirname "$0")/../.."
VENV=${VENV:-.venv}
OUT=build/libraries
export PYTHONPATH=hub:edge_client:shared:. OMP_NUM_THREADS=1
export UV_LINK_MODE=copy UV_PYTHON_DOWNLOADS=never

# uv installs an environment in seconds. If PATH has none, uv itself is installed into a separate folder. The lock lets
# two of these scripts run at the same time.
uv() {
    (
        flock 9
        if ! type -P uv >/dev/null && [ ! -x $OUT/tools/bin/uv ]; then
            "$VENV/bin/python" -m venv $OUT/tools
            $OUT/tools/bin/python -m pip install --quiet --disable-pip-version-check uv
        fi
    ) 9>$OUT/tools.lock
    PATH=$PATH:$OUT/tools/bin command uv "$@"
}

# Prints "MINOR PATH" for each Python from 3.11 on, in PATH and in pyenv. Skips pyenv shims that do not run.
pythons() {
    local candidate
    for candidate in $(compgen -c python3 | grep -x 'python3\(\.[0-9]*\)\?' | sort -u) \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python; do
        "$candidate" -c '
import ensurepip, sys
if (3, 11) <= sys.version_info and sys.version_info.releaselevel == "final":
    print(sys.version_info.minor, sys.executable)' 2>/dev/null || true
    done | sort -u -n
}

# environment NAME PYTHON UV_OPTION... < REQUIREMENTS
environment() {
    local name=$1 python=$2
    shift 2
    rm -rf "${OUT:?}/$name"
    uv venv --quiet --python "$python" "$OUT/$name"
    uv pip install --quiet --python "$OUT/$name/bin/python" "$@" --requirement -
    echo "$name: $("$OUT/$name/bin/python" -V)"
}

# tests NAME FILE...: runs the tests with that environment's Python.
tests() {
    local name=$1
    shift
    "$OUT/$name/bin/python" -m pytest -q -p no:cacheprovider -n 2 --dist worksteal "$@"
}

newest() {
    environment newest "$(pythons | tail -n 1 | cut -d ' ' -f 2)" \
        < <("$VENV/bin/python" -m scripts.ci.requirements hub mlx parquet)
    $OUT/newest/bin/python -W error -m scripts.ci.import_all
    tests newest tests/echo_shared/wire/test_codec.py tests/echo_shared/wire/test_message_form.py tests/echo_shared/wire/test_messages.py \
        tests/echo_shared/wire/messages tests/echo_shared/test_settings.py tests/echo_node/host/test_spool.py \
        tests/scripts/docs --ignore tests/scripts/docs/test___main__.py
    "$VENV/bin/python" -m scripts.ci.mixed_run $OUT/newest/bin/python
}

lowest() {
    environment lowest "$(pythons | head -n 1 | cut -d ' ' -f 2)" --resolution lowest-direct \
        < <("$VENV/bin/python" -m scripts.ci.requirements hub parquet)
    $OUT/lowest/bin/python -W error -m scripts.ci.import_all
    tests lowest tests/echo_shared/wire/test_codec.py tests/echo_shared/wire/test_messages.py tests/echo_shared/wire/messages \
        tests/echo_shared/test_settings.py tests/echo_shared/swarm tests/echo_node/net/test_client.py \
        tests/echo_node/net/test_hub_connection.py tests/echo_node/host/test_spool.py
    transformers
}

# Layered over VENV, whose torch is kept: transformers does not require one.
transformers() {
    rm -rf "${OUT:?}/transformers"
    uv pip install --quiet --python "$VENV/bin/python" --target $OUT/transformers transformers
    PYTHONPATH=$OUT/transformers:$PYTHONPATH
    "$VENV/bin/python" -c 'import transformers; print("transformers", transformers.__version__)'
    "$VENV/bin/python" -m pytest -q -p no:cacheprovider -n 2 --dist worksteal tests/echo_shared/sampling/test_torch_sampler.py \
        tests/echo_shared/sampling/test_torch_cache.py tests/echo_shared/sampling/test_torch_step.py \
        tests/echo_shared/sampling/test_torch_prefix_cache.py tests/echo_hub/learner/test_rms_norm.py \
        tests/echo_hub/run/test_chat_template.py tests/echo_hub/run/test_template_files.py \
        tests/echo_hub/run/test_gguf_base.py
}

mkdir -p $OUT
case ${1:-} in
newest | lowest) "$1" ;;
*)
    sed -n '2,7s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
