#!/bin/sh
# gather.sh PROGRAM FOLDER: lays out in FOLDER the root of an image that runs PROGRAM and nothing else.
# The program, the libraries that the linker names, the linker, the shipped model, one user. Times are
# set to one moment, so that equal content makes an equal layer. Called by docker/Dockerfile.
set -eu
program=$1 root=$2

install -d "$root/usr/local/bin" "$root/usr/local/share/pkmserve/models/demo" \
    "$root/usr/local/share/doc/pkmserve" "$root/etc"
install "$program" "$root/usr/local/bin/pkmserve"
install -m 644 models/demo/* "$root/usr/local/share/pkmserve/models/demo"
install -m 644 LICENSE "$root/usr/local/share/doc/pkmserve"

# "libm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x...)" and "/lib64/ld-linux-x86-64.so.2 (0x...)"
ldd "$program" | awk '$2 == "=>" { print $3 } $1 ~ /^\// { print $1 }' | while read -r library; do
    [ -e "$library" ] || { echo "gather: the library $library is missing" >&2; exit 1; }
    install -D -m 755 "$library" "$root$library"
    package=$(dpkg -S "$library" "$(realpath "$library")" 2>/dev/null | cut -d: -f1 | head -1)
    # Each library's terms travel with it.
    [ -z "$package" ] || install -D -m 644 "/usr/share/doc/$package/copyright" \
        "$root/usr/local/share/doc/pkmserve/$package.copyright"
done

echo 'pkmserve:x:65532:65532::/:/nonexistent' >"$root/etc/passwd"
echo 'pkmserve:x:65532:' >"$root/etc/group"
find "$root" -exec touch -h -d "@${SOURCE_DATE_EPOCH:-0}" {} +
