#!/bin/sh
# Converts the golden checkpoints: tests/golden/*/<case>/checkpoint.pt(h) -> <dir>/<case>/, and those of
# memory layers, consolidated.pth with params.json.
#   tests/golden/convert_all.sh [dir, default ${B:-build}/golden]
# Run by the tests that read those models; does only what is missing or older than its source.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
out=${1:-${B:-build}/golden}
python=${PYTHON:-/usr/bin/python3}
mkdir -p "$out"
# convert_case SOURCE [what else the conversion needs]
convert_case() {
    case=$(basename "$(dirname "$1")")
    made=$out/$case/config.json
    stale=$([ -e "$made" ] && find "$1" models/convert -name '*.p*' -newer "$made" || echo missing)
    if [ -n "$stale" ]; then
        "$python" models/convert/convert.py "$@" --program none --output "$out/$case" >/dev/null
    fi
}
for source in tests/golden/xlm/*/checkpoint.pth; do
    convert_case "$source"
done
for source in tests/golden/allattention/*/checkpoint.pt; do
    [ -e "$source" ] || break # a GPU machine may do without them
    set -- --vocab "$(dirname "$source")/vocab.txt"
    case $source in
    */g-span-epsilon/*) set -- "$@" --set adapt_span_ramp=16 ;; # the others have the default
    esac
    convert_case "$source" "$@"
done
for source in tests/golden/memory-layers/*/consolidated.pth; do
    [ -e "$source" ] || break
    convert_case "$source"
done
