#!/usr/bin/env bash
# run.sh BUILD [AREA...]: runs what `make tests` built in BUILD, and the Python tests, and counts.
#
# An AREA is a folder of tests/ (kernels, cuda_host, models, convert, train, golden, engine, server, cli, gpu, fuzz, bench,
# docker) or
# one test file of it (kernels/test_pool, server/test_life.py); without any, all run. The last line is "N passed, N failed"; the exit
# status is 0 if something passed and nothing failed. Python tests find the build in the environment:
# B is the folder, PKMSERVE the program. With TEST_DEVICE the tests of the engine run on that backend
# alone, else on ref and cpu. RUN is a command that runs the C programs: an emulator. TEST_JOBS areas run side by side (1); each is shown when it is over. The Python tests of the
# server mostly wait for it: WORKERS of their files run side by side where pytest-xdist is installed.
# As others run beside them, their servers compute with one thread, or PKMSERVE_THREADS: several would wait for each other.
set -uo pipefail
cd "$(dirname "$0")/.." || exit 2
build=$1
shift
B=$(realpath "$build")
export B PKMSERVE=$B/pkmserve PYTHONDONTWRITEBYTECODE=1
export PATH=$PATH:$PWD/build/tools
export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1 second_deadlock_stack=1}
python=${PYTHON:-/usr/bin/python3}
passed=0 failed=0 skipped=0 reported=0
WORKERS=${WORKERS:-3}
logs=$(mktemp -d)
output=$logs/main
trap 'rm -rf "$logs"' EXIT
rm -rf "$build/log" # what an earlier run found wrong

# report NAME PASSED FAILED SKIPPED RERUN: one line when all is well, else also the end of the output and
# how to rerun.
report() {
    printf '%-40s %4d passed, %d failed%s, %d s\n' "$1" "$2" "$3" "$([ "$4" = 0 ] || echo ", $4 skipped")" \
        $((SECONDS - reported))
    reported=$SECONDS
    if [ "$3" -gt 0 ]; then
        local log
        log=$build/log/$(tr -c 'a-z0-9_\n' - <<<"$1").txt
        mkdir -p "$build/log" && cp "$output" "$log"
        [ "$(wc -l <"$output")" -le 150 ] || echo "    (the end of $log)"
        tail -n 150 "$output" | sed 's/^/    /'
        echo "    rerun: $5"
    fi
    passed=$((passed + $2)) failed=$((failed + $3)) skipped=$((skipped + $4))
}

# A cmocka program, and what to call this run of it. One that dies without a summary is one failure.
run_c() {
    local program=$build/tests/$1 p f s
    # shellcheck disable=SC2086 # a command and its arguments
    ${RUN:-} "$program" >"$output" 2>&1
    local status=$?
    p=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test(s).*/\1/p' "$output" | tail -1)
    f=$(sed -n 's/^\[  FAILED  \] \([0-9]*\) test(s).*/\1/p' "$output" | tail -1)
    s=$(sed -n 's/^\[  SKIPPED \] \([0-9]*\) test(s).*/\1/p' "$output" | tail -1)
    if [ "$status" -ne 0 ] && [ "${f:-0}" -eq 0 ]; then
        f=1
    fi
    report "$1${2:+ ($2)}" "${p:-0}" "${f:-0}" "${s:-0}" \
        "${2:+TEST_DEVICE=$2 }B=$build $program"
}

# run_python NAME PATH...: pytest files of a folder, all or those named. -rs names what was skipped, and why.
run_python() {
    local name=$1 command status
    shift
    command=("$python" -m pytest -q -rs -p no:cacheprovider)
    if [[ $name == server* ]]; then
        command=(env PKMSERVE_THREADS="${PKMSERVE_THREADS:-1}" "${command[@]}")
        if "$python" -c 'import xdist' 2>/dev/null; then
            command+=(-n "$WORKERS" --dist loadfile)
        fi
    fi
    command+=("$@")
    "${command[@]}" >"$output" 2>&1
    status=$?
    count() { grep -oE "[0-9]+ $1" <<<"$(tail -1 "$output")" | cut -d' ' -f1; }
    local p f e s
    p=$(count passed) f=$(count failed) e=$(count error) s=$(count skipped)
    f=$((${f:-0} + ${e:-0}))
    if [ "$status" -ne 0 ] && [ "$f" -eq 0 ]; then
        f=1
    fi
    report "$name (python)" "${p:-0}" "$f" "${s:-0}" "PKMSERVE=$PKMSERVE B=$B ${command[*]}"
    grep '^SKIPPED' "$output" | sed 's/^/    /'
}

# A fuzz target over its corpus: each file is one test of "does not crash".
run_fuzz() {
    local name=${1#fuzz/} program=$build/tests/$1 files
    files=$(find "tests/fuzz/corpus/${name#fuzz_}" -type f 2>/dev/null | wc -l)
    if "$program" "tests/fuzz/corpus/${name#fuzz_}" >"$output" 2>&1; then
        report "$1 (corpus)" "$files" 0 0 ""
    else
        report "$1 (corpus)" 0 1 0 "$program tests/fuzz/corpus/${name#fuzz_}"
    fi
}

# The authors' checkpoints, converted once for all builds.
convert_golden() {
    [ -x tests/golden/convert_all.sh ] || return 0
    tests/golden/convert_all.sh build/golden >"$output" 2>&1 ||
        report "golden: conversion" 0 1 0 "tests/golden/convert_all.sh build/golden"
    [ "$B" = "$PWD/build" ] || ln -sfn "$PWD/build/golden" "$B/golden"
}

# The server's first: they take longest, and mostly wait. Files of Python that are named are one run of pytest.
areas=() files=
for area in "$@"; do
    if [[ $area == *.py ]]; then
        files+="${files:+ }$area"
    else
        areas+=("$area")
    fi
done
[ -z "$files" ] || areas=("$files" "${areas[@]}")
[ ${#areas[@]} -gt 0 ] || areas=(server kernels cuda_host models convert train golden engine cli gpu fuzz bench docker)
case " ${areas[*]} " in *models* | *golden* | *server* | *cli*) convert_golden ;; esac
# One area: the files of its folder, or the file it names.
run_area() {
    local area=$1 source
    if [ -f "tests/$area.c" ]; then
        run_c "$area"
        return
    fi
    if [[ $area == *.py ]]; then
        read -ra source <<<"$area"
        local name=$area
        [ ${#source[@]} -eq 1 ] || name="${source[0]%%/*}, ${#source[@]} files"
        run_python "$name" "${source[@]/#/tests/}"
        return
    fi
    for source in tests/"$area"/test_*.c; do
        [ -f "$source" ] && run_c "$area/$(basename "$source" .c)"
        # What runs on the reference backend by default must hold on the fast one too.
        [ -z "${TEST_DEVICE:-}" ] || continue
        if grep -qs TEST_DEVICE "$source" || grep -qs '"tests/engine/harness.h"' "$source"; then
            TEST_DEVICE=cpu run_c "$area/$(basename "$source" .c)" cpu
        fi
    done
    for source in tests/"$area"/fuzz_*.c; do
        [ -f "$source" ] && run_fuzz "$area/$(basename "$source" .c)"
    done
    if compgen -G "tests/$area/test_*.py" >/dev/null; then
        run_python "$area" "tests/$area"
    fi
}

# In a process of its own, which leaves its counts in a file.
run_apart() {
    output=$logs/$BASHPID passed=0 failed=0 skipped=0 reported=$SECONDS
    if [ "${TEST_JOBS:-1}" -eq 1 ]; then
        run_area "$1"
    else
        run_area "$1" >"$output.shown"
        cat "$output.shown"
    fi
    echo "$passed $failed $skipped" >"$output.sum"
}

for area in "${areas[@]}"; do
    [ "$(jobs -rp | wc -l)" -lt "${TEST_JOBS:-1}" ] || wait -n
    run_apart "$area" &
done
wait
for area in "$logs"/*.sum; do
    read -r p f s <"$area"
    passed=$((passed + p)) failed=$((failed + f)) skipped=$((skipped + s))
done
if [ "$(find "$logs" -name '*.sum' | wc -l)" -ne ${#areas[@]} ]; then
    echo "an area of tests ended without its counts: one failure"
    failed=$((failed + 1))
fi
[ "$skipped" -eq 0 ] || echo "$skipped skipped"
echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
