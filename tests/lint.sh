#!/usr/bin/env bash
# The house rules that a program can check: format, the direction of includes, the fences around
# third-party headers, leftovers, and what clang-tidy, cppcheck and shellcheck find. Prints each finding
# with its place; exit 0 if there is none. --quick leaves the slow analysers out; ANALYZER_NODES=225000 lets one look
# as far as it usually does, which release-check asks for.
set -uo pipefail
shopt -s lastpipe # finding() counts in this shell
cd "$(dirname "$0")/.." || exit 2
mapfile -t sources < <(git ls-files --cached --others --exclude-standard '*.c' '*.h' '*.cc' '*.cu' '*.cuh')
mapfile -t product < <(printf '%s\n' "${sources[@]}" | grep -E '^(kernels|models|engine|server)/')
mapfile -t c_files < <(printf '%s\n' "${product[@]}" | grep '\.c$')
mapfile -t scripts < <(git ls-files --cached --others --exclude-standard '*.sh' '.ci/*')
mapfile -t everything < <(git ls-files --cached --others --exclude-standard)
found=0

# finding TEXT: standard input holds places; none is good.
finding() {
    local places
    places=$(cat)
    if [ -n "$places" ]; then
        printf '%s:\n%s\n\n' "$1" "$places"
        found=$((found + 1))
    fi
}

clang-format --dry-run -Werror "${sources[@]}" 2>&1 | grep 'error:' | finding "format (make fmt)"

# The lines of a comment begin below its "/*". Where one does not, the formatter has cut or moved it.
awk 'FNR == 1 { open = 0 }
     open { match($0, /^ */)
            if (RLENGTH != open || substr($0, RLENGTH + 1, 1) != "*") print FILENAME ":" FNR ": " $0
            if (index($0, "*/")) open = 0
            next }
     { at = index($0, "/*"); before = substr($0, 1, at - 1)
       if (at && !index(substr($0, at), "*/") && gsub(/"/, "", before) % 2 == 0) open = at }' \
    "${sources[@]}" | finding "a comment whose lines do not begin below each other"

# A comment keeps to the 100 columns of the code. A table, whose columns stand three blanks apart, may be wider.
LC_ALL=C.UTF-8 grep -nE '^.{101}' "${sources[@]}" | grep -vE '[^ ] {3}|──' | finding "a line of more than 100 columns"

# A folder's README stays under 80 lines; what is longer is a page of its own.
printf '%s\n' "${everything[@]}" | grep '/README\.md$' | xargs wc -l | awk '$2 != "total" && $1 >= 80 { print $2 ": " $1 }' |
    finding "a folder's README of 80 lines or more"

# A file that a comment names is there. (CUDA's own header is not ours.)
awk -v names="${everything[*]##*/}" \
    'BEGIN { n = split(names, list, " "); for (i = 1; i <= n; i++) is[list[i]] = 1; is["cuda_bf16.h"] = 1 }
     /^ *#include/ { next }
     { rest = $0
       while (match(rest, /[A-Za-z0-9_-]+\.(cuh|cu|cc|c|h|md|py|sh)($|[^A-Za-z0-9_*.])/)) {
           name = substr(rest, RSTART, RLENGTH); before = substr(rest, RSTART - 1, 1)
           sub(/[^A-Za-z0-9_.-]$/, "", name)
           if (!(name in is) && before !~ /[.*>]/) print FILENAME ":" FNR ": " name
           rest = substr(rest, RSTART + RLENGTH - 1)
           if (RLENGTH < 2) break
       } }' "${product[@]}" | finding "a comment names a file that is not there"

# Includes go server → engine → models → kernels, from the repository's root.
rank() {
    case $1 in kernels) echo 0 ;; models) echo 1 ;; engine) echo 2 ;; server) echo 3 ;; *) echo 9 ;; esac
}
for file in "${product[@]}"; do
    layer=$(rank "${file%%/*}")
    while IFS=: read -r line include; do
        included=${include#*\"}
        included=${included%\"*}
        if [ "$(rank "${included%%/*}")" -gt "$layer" ]; then
            echo "$file:$line: $include"
        fi
    done < <(grep -nE '^#include "' "$file")
done | # kernels/cuda says in one place that the test double takes CUDA's
    grep -v '^kernels/cuda/portable.cuh:[0-9]*: #include "tests/cuda_host/cuda_host.h"' |
    finding "an include from the repository's root, in the layer itself or below it"

python3 tests/rooms.py --check | finding "server/: includes go from a folder to one below it, and never in a circle"

# What each C file includes, through any number of headers: "FILE: HEADER" lines, as the compiler says.
dependencies=$(printf '%s\n' "${c_files[@]}" | grep -v '^kernels/cpu/simd/' | xargs "${CC:-gcc}" -std=c11 -I. -D_GNU_SOURCE -M -MG |
    sed -e ':a' -e '/\\$/{N;s/\\\n//;ta}' | awk '{for (i = 3; i <= NF; i++) print $2 ": " $i}')
# fence HEADER FILES: only files that match may see it, whether they include it themselves or not.
fence() {
    {
        grep -E "/$1[^/]*\.h" <<<"$dependencies" | grep -oE '^[^:]*' | sort -u
        grep -lE "^#include <$1" "${product[@]}" /dev/null
    } | grep -vxE "$2" | sort -u | finding "$1 outside of its fence"
}
fence microhttpd 'server/net/(http|http_head)\.c|server/net/http_inside\.h'
fence sentencepiece_processor 'engine/tokenizer_spm\.cc'
fence jansson '(models/(config|config_memory|config_rope|generation_config|json_file|read|safetensors|safetensors_out|tensors)|engine/tokenizer_bpe_file|server/(json/fields|io/(ablate|input|overlay|slots)|score/(score_parse|score_forms|score_labels)|generate/(generate_parse|generate_read|tgi_parse)|api/api_tokens))\.c|models/json_file\.h'
fence zlib 'server/io/codec\.c'
fence zstd 'server/io/codec\.c'
fence cuda_runtime 'kernels/cuda/.*'
fence cublas 'kernels/cuda/.*'

# An op is checked once, in op.c, and only from there are a backend's functions called by way of its table.
grep -nE -- '->compute\.' "${product[@]}" /dev/null | grep -v '^kernels/op\.c:' |
    finding "an op called past its checks: call op_<op> (kernels/op.h)"
# The lowest layer reports by struct err and the backend's note and warning; only a failed CHECK prints.
grep -nE '\b(fprintf|printf|fputs|puts|perror)\(' "${product[@]}" /dev/null | grep '^kernels/' |
    grep -v '^kernels/err\.c:' | finding "kernels/ prints"
# The contract, ref and host know no other backend; backend.c opens them by name.
grep -nE '#include "kernels/(cpu|cuda)/' "${product[@]}" /dev/null | grep -E '^kernels/(ref|host|[a-z0-9_]*\.)' |
    grep -vE '^kernels/backend\.c:' | finding "ref/, host/ and the contract know no other backend"

# "Where is rope?" has one answer: an op's files have the same name in ref/, cpu/, cpu/simd/ and cuda/,
# or in the last begin with it. Drawing needs no vectors of its own; the linear layer is gemm* there.
for file in kernels/ref/*.c; do
    stem=$(basename "$file" .c)
    case $stem in ref | weight) continue ;; esac
    [ -f "kernels/cpu/$stem.c" ] || echo "kernels/cpu/$stem.c"
    compgen -G "kernels/cuda/$stem*.cu*" >/dev/null || echo "kernels/cuda/$stem.cu"
    case $stem in linear | sample) continue ;; esac
    [ -f "kernels/cpu/simd/$stem.c" ] || echo "kernels/cpu/simd/$stem.c"
done | finding "an op of kernels/ref without a file of its name"

grep -nE 'MHD_quiesce_daemon *\(|json_loadb *\(' "${product[@]}" /dev/null | grep -v '^models/json_file\.c:' |
    finding "it may end the process: http_refuse_connections (server/net/http.c), json_read (models/json_file.h)"

grep -nE 'CHECK\((false|0)\)' "${product[@]}" /dev/null | finding "a place that only a bug reaches: UNREACHABLE()"

# shellcheck disable=SC2126 # the count is not wanted
grep -nE '\b(TODO|FIXME|XXX)\b' "${product[@]}" /dev/null | finding "a leftover: write an issue"
grep -nIE '/(work|home|root)/[a-z]' "${everything[@]}" /dev/null |
    grep -vE '^(tests/lint\.sh|.*\.(json|txt|md5)):' | finding "an absolute path of some machine"
for file in "${product[@]}"; do
    lines=$(wc -l <"$file")
    [ "$lines" -le 600 ] || echo "$file: $lines lines"
done | finding "a file far above 500 lines: cut it where it has a joint"
for file in "${sources[@]}"; do
    head -c 2 "$file" | grep -q '/\*' || echo "$file"
done | finding "no head comment: what is it for, who calls it, what does it promise"

shellcheck "${scripts[@]}" 2>&1 | finding "shellcheck"

if [ "${1:-}" != --quick ]; then
    # Suppressed is what it only imagines here; compilers and sanitizers see the real cases.
    cppcheck --quiet --std=c11 --language=c --inline-suppr -I. -D__x86_64__ -DISA_PLAIN \
        --enable=warning,performance,portability --suppress=unknownMacro --suppress=missingIncludeSystem \
        --suppress=uninitvar --suppress=legacyUninitvar --suppress=invalidPointerCast \
        --suppress=ctunullpointer --suppress=arrayIndexThenCheck --suppress=shiftTooManyBitsSigned \
        --template='{file}:{line}: {id}: {message}' \
        "${c_files[@]}" 2>&1 | finding "cppcheck"
    # The analyser's bound on a function's paths; the usual one, 225000, takes more than ten times as long.
    printf '%s\n' "${c_files[@]}" | grep -v '^kernels/cpu/simd/' |
        xargs -P "$(nproc)" -n 4 sh -c 'clang-tidy --quiet "$@" -- -std=c11 -I. -D_GNU_SOURCE \
            -Xclang -analyzer-config -Xclang max-nodes='"${ANALYZER_NODES:-5000}" tidy 2>&1 |
        grep -E 'error:|warning:' | sort -u | finding "clang-tidy"
fi

[ "$found" -eq 0 ] && echo "lint: ${#sources[@]} sources, nothing found"
exit $((found > 0))
