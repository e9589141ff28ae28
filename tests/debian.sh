#!/bin/sh
# debian.sh SUITE: builds what is committed in a bare root of another Debian, with its compilers and libraries, and runs
# the tests there. As root, with debootstrap and the network. Called by `make check-debian`.
set -eu
cd "$(dirname "$0")/.."
suite=$1
command -v debootstrap >/dev/null || { echo "check-debian: install debootstrap" >&2; exit 1; }
root=$(mktemp -d)
trap 'rm -rf --one-file-system "$root" "$root.log"' EXIT
step() {
    "$@" >"$root.log" 2>&1 || { tail "$root.log" >&2; exit 1; }
}
# What is mounted for a command is gone with it.
inside() {
    # shellcheck disable=SC2016 # the inner shell's
    unshare --mount sh -euc 'mount -t proc proc "$0/proc"
        mount --rbind /sys "$0/sys"
        mount --rbind /dev "$0/dev"
        mount -t devpts -o newinstance,ptmxmode=666 devpts "$0/dev/pts"
        exec chroot "$0" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 "$@"' "$root" "$@"
}
step debootstrap --variant=minbase --include=ca-certificates "$suite" "$root"
step cp /etc/resolv.conf /etc/hosts "$root/etc/"
git clone -q --no-hardlinks . "$root/src"
step inside /src/.ci/deps build test
inside make -C /src -j"$(nproc)" test
