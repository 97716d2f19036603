#!/bin/sh
# llama_with_rpc.sh PYTHON [PIP OPTION...]: recompiles llama-cpp-python in PYTHON's environment if it lacks RPC.
# pip caches compiled wheels regardless of CMAKE_ARGS, so a wheel with other options may have come from its cache. The
# new wheel replaces it there. Does nothing without llama-cpp-python, or if CMAKE_ARGS turns RPC off.
set -eu
python=$1
shift
case ${CMAKE_ARGS:-} in *GGML_RPC=OFF*) exit ;; esac
found=$("$python" -c 'import llama_cpp; print(llama_cpp.llama_supports_rpc(), llama_cpp.__version__)' 2>/dev/null) || exit 0
case $found in True*) exit ;; esac
version=${found#* }
echo "llama-cpp-python $version came from pip's cache. It lacks RPC, which several machines need to share a model."
echo "Compiling it again, with RPC."
"$python" -m pip cache remove "llama_cpp_python-$version*" >/dev/null 2>&1 || true # there may be no cache
CMAKE_ARGS="-DGGML_RPC=ON ${CMAKE_ARGS:-}" "$python" -m pip install --disable-pip-version-check --force-reinstall \
    --no-deps --no-binary llama-cpp-python "$@" "llama-cpp-python==$version"
