# Settings of posix.sh for Linux; sourced.
# shellcheck shell=sh disable=SC2034

home_dir=${XDG_DATA_HOME:-$HOME/.local/share}/echo-swarm
data_dir=${XDG_DATA_HOME:-$HOME/.local/share}/echo-node
config_dir=${XDG_CONFIG_HOME:-$HOME/.config}/echo-node
service_dir=${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user/default.target.wants
service_file=${XDG_CONFIG_HOME:-$HOME/.config}/systemd/user/echo-node.service
python_hint="For example: sudo apt install python3 python3-venv"
compiler_hint="For example: sudo apt install build-essential. Or take PyTorch instead of llama.cpp: --extra cuda"
if nvidia-smi -L >/dev/null 2>&1; then
    detected_extra=cuda
else
    detected_extra=cpu
fi
