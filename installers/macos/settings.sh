# What posix.sh wants to know about macOS; sourced.
# Every Mac gets llama.cpp: on Apple Silicon it is compiled with Metal, its default there. On an Intel Mac libtorrent
# has no wheel and is left out; artefacts then come over HTTP alone.
# shellcheck shell=sh disable=SC2034

home_dir="$HOME/Library/Application Support/echo-swarm"
data_dir="$HOME/Library/Application Support/echo-node"
config_dir=$data_dir
service_dir=$HOME/Library/LaunchAgents
python_hint="For example: brew install python@3.13"
compiler_hint="Get one with: xcode-select --install"
detected_extra=cpu
