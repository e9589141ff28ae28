#!/bin/sh
# check.sh BUILD: installs the packages that `make dist deb` made into a bare Debian (debootstrap, as root, with the
# network) and runs the program there. Called by `make check-packages`.
set -eu
cd "$(dirname "$0")/../.."
build=$1
command -v debootstrap >/dev/null || { echo "check-packages: install debootstrap" >&2; exit 1; }
root=$(mktemp -d)
trap 'umount -q "$root/proc" || true; rm -rf --one-file-system "$root"' EXIT
debootstrap --variant=minbase "$(sed -n 's/^VERSION_CODENAME=//p' /etc/os-release)" "$root" >"$build/debootstrap.log"
mount -t proc proc "$root/proc"

inside() {
    chroot "$root" env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin DEBIAN_FRONTEND=noninteractive "$@"
}
try() { # the program's name
    inside "$1" version
    inside "$1" inspect >/dev/null
    echo '{"text": "It was a dark night.", "id": 7}' | inside "$1" score --jsonl --fields perplexity
    [ -n "$(inside "$1" generate --max-tokens 5 --seed 1 'It was')" ]
}

cp "$build"/pkmserve_*.deb "$root/pkmserve.deb"
inside apt-get -qq install -y --no-install-recommends /pkmserve.deb >"$build/check-packages.log" 2>&1
try pkmserve
inside test -s /lib/systemd/system/pkmserve.service
inside sh -c 'ls /usr/share/bash-completion/completions/pkmserve /usr/share/fish/vendor_completions.d/pkmserve.fish' >/dev/null
# The tarball brings the program at another place; the libraries are those that the package has brought.
inside dpkg --remove pkmserve >/dev/null
[ ! -e "$root/usr/bin/pkmserve" ]
tar -xzf "$build"/pkmserve-*.tar.gz -C "$root/opt"
try "/opt/$(basename "$build"/pkmserve-*.tar.gz .tar.gz)/bin/pkmserve"
echo "packages: both run in a bare root"
