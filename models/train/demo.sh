#!/usr/bin/env bash
# demo.sh RUN DATA: makes the demo model and its dense twin, or goes on where it was stopped.
#
# RUN is a folder for tokens, checkpoints and results; DATA has the folders stories and books (README.md
# says which). Both twins train side by side, on the GPU if there is one, else on a core each at the
# lowest priority. SIGTERM and Ctrl-C save both; the same command goes on. When both have reached the end,
# they are exported and evaluated: RUN/demo, RUN/demo-dense, RUN/facts.jsonl, RUN/perplexity.jsonl; with the
# program also RUN/compare.txt, which says what bf16 and int8 changed, and ten stories, RUN/stories.md.
#
#   PYTHON=python3 DECAY=3300 TOTAL=3900    steps of 4,096 tokens at which the rate falls, and is zero;
#                                             may be given anew when a run goes on
#   PKMSERVE=build/pkmserve                   the program
#   SEED=1                                    of the first weights and of the order of the tokens
#   ARGS="--compile"                          more options of train.py
set -euo pipefail
[ $# -eq 2 ] || { sed -n '2,16s/^# \{0,1\}//p' "$0" >&2; exit 2; }
run=$1 data=$2
here=$(dirname "$(realpath "$0")")
python=${PYTHON:-python3}
# Freed memory stays in the process: without this a tenth of the time on a CPU goes into page faults.
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=16000000000
mkdir -p "$run"
[ -f "$run/data/meta.json" ] ||
    "$python" "$here/demo_data.py" --stories "$data/stories" --books "$data/books" --out "$run/data"

twins=()
# Ends what is still running, for one twin alone is of no use: of the trap below, and where a twin failed.
# shellcheck disable=SC2317
stop() {
    kill -TERM "${twins[@]}" 2>/dev/null || true
    wait || true
    exit 1
}
trap stop TERM INT
read -ra more <<<"${ARGS:-}"
for twin in memory dense; do
    options=(--data "$run/data" --out "$run/$twin" --config "$here/configs/demo.json" --threads 1
        --lr 2e-3 --value-lr 1e-2 --warmup 150 --seed "${SEED:-1}"
        --decay-start "${DECAY:-3300}" --total-steps "${TOTAL:-3900}")
    [ "$twin" = memory ] || options+=(--dense)
    nice -n 19 "$python" "$here/train.py" "${options[@]}" "${more[@]}" &
    twins+=($!)
done
for _ in "${twins[@]}"; do
    wait -n || stop
done

"$python" "$here/report.py" --runs "$run/memory" "$run/dense" --out "$run/curves.svg" ||
    true # a run of a few steps has no curves, which it says
export_twin() {
    "$python" "$here/export.py" --checkpoint "$run/$1/last.pt" --tokenizer "$run/data/tokenizer.model" \
        --out "$run/$2" --dtype "$3" --values int8 --temperature 0.7 --top-p 0.95
}
export_twin memory demo bf16
export_twin dense demo-dense int8
cp "$run/data/facts.tsv.xz" "$run/demo"
"$python" "$here/facts.py" --model "$run/demo" "$run/demo-dense" --facts "$run/data/facts.tsv.xz" |
    tee "$run/facts.jsonl"
"$python" "$here/evaluate.py" --model "$run/demo" "$run/demo-dense" \
    --text "$data/stories/test.txt" "$data/books/test.txt" | tee "$run/perplexity.jsonl"
"$python" "$here/evaluate.py" --model "$run/demo" --zero-memory \
    --text "$data/stories/test.txt" "$data/books/test.txt" | tee -a "$run/perplexity.jsonl"
"$python" "$here/evaluate.py" --model "$run/demo" --text "$data/stories/valid.txt" \
    --parity "$run/demo/parity.json"

pkmserve=${PKMSERVE:-$here/../../build/pkmserve}
[ -x "$pkmserve" ] || exit 0
"$python" "$here/export.py" --checkpoint "$run/memory/last.pt" --tokenizer "$run/data/tokenizer.model" \
    --out "$run/demo-f32" --dtype f32
"$pkmserve" compare --model "$run/demo" --against "$run/demo-f32" "$data/stories/test.txt" >"$run/compare.txt" ||
    echo "demo.sh: $run/demo is farther from fp32 than compare allows: see $run/compare.txt" >&2
openings=("Once upon a time, there was a little girl named Lily." "One day, a small boat came down the river."
    "Tom had a red ball." "The old cat sat by the door." "Ben and his sister were in the garden."
    "There was a bird who could not sing." "Mia wanted to bake a cake for her mom." "It was a cold, white morning."
    "A little bear lost his hat in the woods." "Sam found a shiny stone in the park.")
for seed in {1..10}; do
    printf '%d. ' "$seed"
    "$pkmserve" generate --model "$run/demo" --max-tokens 160 --seed "$seed" "${openings[seed - 1]}" | tr '\n' ' '
    printf '\n'
done >"$run/stories.md"
