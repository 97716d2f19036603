#!/usr/bin/env bash
# Makes build/doors: an environment in which tests run clients' code, the tinker SDK, tinker-cookbook and verifiers.
# These want other versions of some packages than Echo does. The environment holds those and sees all other packages of
# the developers' environment, for example torch, so that nothing large is downloaded twice.
# build/doors/chat-base is a base model for hubs that these clients use.
# Variables: VENV, the developers' environment (make env), default .venv.
set -euo pipefail
cd "$(dirname "$0")/../.."
VENV=${VENV:-.venv}
OUT=build/doors

rm -rf $OUT
"$VENV/bin/python" -m venv --without-pip $OUT
"$VENV/bin/python" -m pip --python $OUT/bin/python install --quiet --disable-pip-version-check --no-deps \
    -r scripts/ci/doors.txt
seen=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
own=$($OUT/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# site adds the folders of .pth files behind the environment's own. A .pth file of the folder added here is not read, so
# the editable installation of Echo stays out.
echo "$seen" >"$own/developers.pth"
# The tests turn warnings into errors, also those of compiling a library.
$OUT/bin/python -m compileall -qq -j 0 "$own" || true
$OUT/bin/python -c 'import tinker, tinker_cookbook, torch, verifiers'
PYTHONPATH=hub:shared:. "$VENV/bin/python" -m scripts.ci.chat_base $OUT/chat-base
