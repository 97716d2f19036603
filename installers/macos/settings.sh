# Settings of posix.sh for macOS; sourced.
# Apple silicon gets MLX, which computes on the GPU and needs no compiler; an Intel Mac gets llama.cpp.
# libtorrent only has wheels for Apple silicon with macOS 14 (Darwin 23) or newer. Echo does not require it on Intel
# Macs, which fetch artefacts over HTTP only. cryptography has wheels for Intel Macs up to release 48.
# shellcheck shell=sh disable=SC2034

home_dir="$HOME/Library/Application Support/echo-swarm"
data_dir="$HOME/Library/Application Support/echo-node"
config_dir=$data_dir
service_dir=$HOME/Library/LaunchAgents
service_file=$service_dir/org.echo-swarm.node.plist
python_hint="For example: brew install python@3.13"
compiler_hint="Get one with: xcode-select --install"
unsupported='' pins_edit=''
if [ "$(uname -m)" = arm64 ]; then
    detected_extra=mlx
    darwin=$(uname -r)
    if [ "${darwin%%.*}" -lt 23 ]; then
        unsupported="On Apple silicon Echo needs macOS 14 or newer: libtorrent has no build for older ones. Update macOS."
    fi
else
    detected_extra=cpu
    pins_edit='s/^cryptography==.*/cryptography<49/'
fi
