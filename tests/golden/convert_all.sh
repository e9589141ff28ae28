#!/bin/sh
# Converts the golden checkpoints: tests/golden/xlm/<case>/checkpoint.pth -> <dir>/<case>/.
#   tests/golden/convert_all.sh [dir, default ${B:-build}/golden]
# Run by the tests that read those models; does only what is missing or older than its source.
set -eu
root=$(cd "$(dirname "$0")/../.." && pwd)
cd "$root"
out=${1:-${B:-build}/golden}
python=${PYTHON:-/usr/bin/python3}
mkdir -p "$out"
for source in tests/golden/xlm/*/checkpoint.pth; do
    case=$(basename "$(dirname "$source")")
    made=$out/$case/config.json
    stale=$([ -e "$made" ] && find "$source" models/convert -name '*.p*' -newer "$made" || echo missing)
    if [ -n "$stale" ]; then
        "$python" models/convert/convert.py "$source" --output "$out/$case" >/dev/null
    fi
done
