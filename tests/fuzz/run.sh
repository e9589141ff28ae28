#!/usr/bin/env bash
# run.sh BUILD SECONDS: runs every libFuzzer target of BUILD for SECONDS, starting from the corpus in
# tests/fuzz/corpus/<target> and keeping what it finds in BUILD/corpus/<target>. A crash leaves its input
# in BUILD and fails.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
build=$1 seconds=$2
failed=0
for program in "$build"/tests/fuzz/*.libfuzzer; do
    name=$(basename "$program" .libfuzzer)
    target=${name#fuzz_}
    seeds=tests/fuzz/corpus/$target
    mkdir -p "$build/corpus/$target"
    echo "== $name, $seconds s"
    folders=("$build/corpus/$target")
    [ -d "$seeds" ] && folders+=("$seeds")
    if ! "$program" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 \
        -verbosity=0 -close_fd_mask=1 -artifact_prefix="$build/crash-$target-" "${folders[@]}"; then
        failed=$((failed + 1))
        echo "   failed; rerun: $program $build/crash-$target-*"
    fi
done
echo "$failed fuzz targets failed"
[ "$failed" -eq 0 ]
