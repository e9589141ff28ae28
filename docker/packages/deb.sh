#!/bin/sh
# deb.sh BUILD VERSION: what `make install` installs as a Debian package of this machine's architecture, with the
# systemd unit. Called by `make deb`.
set -eu
cd "$(dirname "$0")/../.."
build=$1 version=$2
architecture=$(dpkg --print-architecture)
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
root=$source/debian/pkmserve
install -d -m 755 "$root" "$root/DEBIAN"
make -s -o all install B="$build" DESTDIR="$root" PREFIX=/usr
strip "$root/usr/bin/pkmserve"
gzip -9n "$root/usr/share/man/man1/pkmserve.1"
# Debian keeps zsh's completions elsewhere.
install -d "$root/usr/share/zsh/vendor-completions"
mv "$root/usr/share/zsh/site-functions/_pkmserve" "$root/usr/share/zsh/vendor-completions"
rmdir "$root/usr/share/zsh/site-functions"
install -D -m 644 -t "$root/lib/systemd/system" docker/packages/pkmserve.service
install -D -m 644 LICENSE "$root/usr/share/doc/pkmserve/copyright"

# dpkg-shlibdeps finds the packages that the program needs, and the oldest version of each that has what it uses. It
# expects to be in a source package's folder.
printf 'Source: pkmserve\n\nPackage: pkmserve\nArchitecture: any\n' >"$source/debian/control"
depends=$(cd "$source" && dpkg-shlibdeps -O debian/pkmserve/usr/bin/pkmserve | sed -n 's/^shlibs:Depends=//p')
[ -n "$depends" ]
cat >"$root/DEBIAN/control" <<END
Package: pkmserve
Version: $version
Architecture: $architecture
Maintainer: the authors of pkmserve <pkmserve@localhost>
Installed-Size: $(du -sk "$root" | cut -f1)
Depends: $depends
Recommends: python3-numpy
Section: science
Priority: optional
Description: inference server for memory-augmented transformers
 Serves, scores and generates text with transformers that have product-key
 memories, over HTTP and from the command line.
END
package=$build/pkmserve_${version}_$architecture.deb
dpkg-deb --root-owner-group --build "$root" "$package"
