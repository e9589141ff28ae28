#!/usr/bin/env bash
# run.sh BUILD [MEMORY...]: measures model A (12 layers of 1024, 60k vocabulary, a memory of 512² slots) with
# random weights in f32, bf16 and int8, and prints Markdown tables. With MEMORY arguments (keys per half, for
# example 128 512 1024) it measures bf16 models that differ in the number of slots alone: the cost of a
# token should not grow with them. With memory-layers it measures the 373M model of Memory Layers at Scale, with
# 512² slots, in bf16 and int8. Models are kept below BUILD/bench-model.
set -euo pipefail
cd "$(dirname "$0")/../.."
build=$1
shift
models=$build/bench-model
mkdir -p "$models"

# model NAME OPTION...: writes it once. config.json is written last, so it marks a whole model.
model() {
    local folder=$models/$1
    shift
    [ -e "$folder/config.json" ] || "$build/tests/bench/make_model" "$folder" "$@"
}
measure() {
    echo
    "$build/pkmserve" bench --model "$@"
}

if [ "${1:-}" = memory-layers ]; then
    model memory-layers --family memory_llama --layers 24 --ff 2816 --vocab 32000 --positions 2048 \
        --memory-layer 4,12,20 --key-width 512 --dtype bf16
    measure "$models/memory-layers"
    measure "$models/memory-layers" --dtype int8
    exit
fi
if [ $# -gt 0 ]; then
    for keys in "$@"; do
        model "slots-$keys" --keys "$keys" --dtype bf16
        measure "$models/slots-$keys"
    done
    exit
fi
model f32 --dtype f32
model bf16 --dtype bf16
measure "$models/f32"
measure "$models/bf16"
measure "$models/f32" --dtype int8 --memory-placement device
