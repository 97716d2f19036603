# What posix.sh wants to know about macOS; sourced.
# Apple silicon gets MLX, which computes on the GPU and needs no compiler; an Intel Mac gets llama.cpp. On an Intel Mac
# libtorrent has no wheel and is left out; artefacts then come over HTTP alone.
# shellcheck shell=sh disable=SC2034

home_dir="$HOME/Library/Application Support/echo-swarm"
data_dir="$HOME/Library/Application Support/echo-node"
config_dir=$data_dir
service_dir=$HOME/Library/LaunchAgents
service_file=$service_dir/org.echo-swarm.node.plist
python_hint="For example: brew install python@3.13"
compiler_hint="Get one with: xcode-select --install"
if [ "$(uname -m)" = arm64 ]; then
    detected_extra=mlx
else
    detected_extra=cpu
fi
