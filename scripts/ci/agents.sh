#!/usr/bin/env bash
# Makes build/agents: a Python environment with libraries of agents' environments, TextArena and OpenEnv. Tests start
# sessions and servers in it. It does not see the developers' environment, as the interpreter of sessions.python does
# not.
# Variables: VENV, the developers' environment (make env), default .venv.
set -euo pipefail
cd "$(dirname "$0")/../.."
VENV=${VENV:-.venv}
OUT=build/agents

rm -rf $OUT
"$VENV/bin/python" -m venv --without-pip $OUT
"$VENV/bin/python" -m pip --python $OUT/bin/python install --quiet --disable-pip-version-check --no-deps \
    -r scripts/ci/agents.txt
# The tests turn warnings into errors, also those of compiling a library.
own=$($OUT/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
$OUT/bin/python -m compileall -qq -j 0 "$own" || true
$OUT/bin/python -c 'import textarena, uvicorn; from openenv.core.env_server import create_app'
