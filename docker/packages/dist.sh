#!/bin/sh
# dist.sh BUILD VERSION: packs what `make install` installs as BUILD/pkmserve-VERSION.tar.gz. Called by `make dist`.
set -eu
cd "$(dirname "$0")/../.."
build=$1 name=pkmserve-$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
make -s -o all install B="$build" DESTDIR="$folder/$name" PREFIX=
tar --sort=name --owner=0 --group=0 --numeric-owner -C "$folder" -czf "$build/$name.tar.gz" "$name"
echo "$build/$name.tar.gz"
