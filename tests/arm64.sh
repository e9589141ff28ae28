#!/bin/sh
# arm64.sh BUILD ROOT: which instruction set the program of an ARM64 build chooses on processors that have more or fewer.
# By qemu, with the libraries in ROOT. Called by `make check-arm64`.
set -eu
cd "$(dirname "$0")/.."
build=$1 root=$2

on() { # PROCESSOR ARGUMENT...
    processor=$1
    shift
    qemu-aarch64 -cpu "$processor" -L "$root" "$build/pkmserve" "$@"
}
expect() { # WHAT EXPECTED GOT
    [ "$2" = "$3" ] || { echo "arm64: $1: expected $2, got $3" >&2; exit 1; }
}
chosen() {
    on "$1" inspect --json | /usr/bin/python3 -c 'import json, sys; print(json.load(sys.stdin)["backend"])'
}

expect "a Cortex-A57 chooses" cpu-neon "$(chosen cortex-a57)"
expect "a Cortex-A76 chooses" cpu-neon-dot "$(chosen cortex-a76)"
expect "a processor with BF16 chooses" cpu-neon-bf16 "$(chosen max)"
if refusal=$(PKMSERVE_ISA=neon-bf16 on cortex-a76 inspect 2>&1); then
    echo "arm64: neon-bf16 was not refused on a Cortex-A76" >&2
    exit 1
fi
case $refusal in
*"neon-bf16 needs NEON with dot products of bytes and of BF16, which this machine lacks"*) ;;
*) echo "arm64: the refusal says: $refusal" >&2; exit 1 ;;
esac
