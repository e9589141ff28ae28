#!/bin/sh
# deb.sh BUILD VERSION: what `make install` installs as a Debian package of this machine's architecture, with the
# systemd unit. It depends on the packages whose libraries the program is linked with. Called by `make deb`.
set -eu
cd "$(dirname "$0")/.."
build=$1 version=$2
architecture=$(dpkg --print-architecture)
root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
chmod 755 "$root"
make -s -o all install B="$build" DESTDIR="$root" PREFIX=/usr
strip "$root/usr/bin/pkmserve"
gzip -9n "$root/usr/share/man/man1/pkmserve.1"
# Debian keeps zsh's completions elsewhere.
install -d "$root/usr/share/zsh/vendor-completions"
mv "$root/usr/share/zsh/site-functions/_pkmserve" "$root/usr/share/zsh/vendor-completions"
rmdir "$root/usr/share/zsh/site-functions"
install -D -m 644 -t "$root/lib/systemd/system" packaging/pkmserve.service
install -D -m 644 LICENSE "$root/usr/share/doc/pkmserve/copyright"

# Those that the program names itself, at the place where the linker finds them ("libm.so.6 => /lib/.../libm.so.6
# (0x...)"); dpkg may know the file by the folder's other name.
depends=$(readelf -d "$build/pkmserve" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | while read -r name; do
    library=$(ldd "$build/pkmserve" | awk -v name="$name" '$1 == name && $2 == "=>" { print $3 }')
    [ -n "$library" ] || continue
    dpkg -S "$library" "$(realpath "$library")" 2>/dev/null | cut -d: -f1 | head -1
done | sort -u | paste -sd, | sed 's/,/, /g')
mkdir "$root/DEBIAN"
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
