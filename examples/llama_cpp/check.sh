#!/usr/bin/env bash
# Short runs of the programs of this folder that must end well, or with the right error: check.sh BIN MODEL TEXT
set -euo pipefail
bin=$1 model=$2 text=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
failed=0

# expect CODE PATTERN COMMAND...: the command ends with the code, and its output has the pattern.
expect() {
    local code=0
    "${@:3}" >"$scratch/out" 2>&1 || code=$?
    if [[ $code -ne $1 ]] || ! grep -qE -- "$2" "$scratch/out"; then
        echo "FAILED (code $code, expected $1 and \"$2\"): ${*:3}"
        tail -n 15 "$scratch/out"
        failed=1
    else
        echo "ok: $2"
    fi
}
generate() { expect "$1" "$2" "$bin/verkv_generate" --model "$model" --prompt "$text" "${@:3}"; }

echo "The quick brown fox" >"$scratch/short"
: >"$scratch/empty"

generate 0 '24 tokens generated' --prompt-tokens 400 --context 512 --predict 24
# What the engine quantises is read through float.
generate 0 '12 tokens generated' --prompt-tokens 300 --context 512 --predict 12 --ctk q8_0 --ctv q8_0
# All rows resident: the engine's own output, to rounding.
generate 0 '^all +100.00 +0.00' --prompt-tokens 300 --context 512 --predict 8 --kept 1 --plan never --sketch exact
generate 0 '12 tokens generated' --prompt-tokens 300 --context 512 --predict 12 --target output --sketch rotated
# Two sequences in a batch.
generate 0 '24 tokens generated' --prompt-tokens 300 --context 512 --predict 12 --sequences 2 --temperature 0.8
generate 0 'rows of a layer were read anew' --prompt-tokens 100 --context 256 --predict 170 --sequences 2 --context-shift \
    --temperature 0.5
# Cells of the prompt that sequences share move once only, and every token still sees all before it.
generate 0 '^all +100.00 +0.00' --prompt-tokens 200 --context 256 --predict 70 --sequences 3 --context-shift \
    --temperature 0.5 --kept 1 --plan never --sketch exact
generate 1 'leaves nothing to drop' --prompt-tokens 100 --context 256 --context-shift --sink 255
generate 1 '8 sequences do not fit' --prompt-tokens 100 --context 256 --sequences 8 --batch 4
# The token that takes the cell of the only one that was dropped is a new one.
generate 0 'rows of a layer were read anew' --prompt-tokens 250 --context 256 --predict 9 --context-shift --sink 253
# A prompt shorter than sink and local; a context that fills up, and one that shifts.
expect 0 '8 tokens generated' "$bin/verkv_generate" --model "$model" --prompt "$scratch/short" --context 256 --predict 8
generate 0 'the context of 256 tokens is full' --prompt-tokens 250 --context 256 --predict 20
generate 0 'rows of a layer were read anew' --prompt-tokens 250 --context 256 --predict 24 --context-shift
generate 1 'the prompt has [0-9]+ tokens, the context 256' --context 256 --predict 2
expect 1 'no text in' "$bin/verkv_generate" --model "$model" --prompt "$scratch/empty"
expect 1 'no model that this llama.cpp can load' "$bin/verkv_generate" --model "$text" --prompt "$text"
expect 1 'no model file' "$bin/verkv_generate" --model "$scratch/none.gguf" --prompt "$text"
# Interrupted: what was made so far is reported.
"$bin/verkv_generate" --model "$model" --prompt "$text" --prompt-tokens 64 --context 512 --predict 400 >"$scratch/out" 2>&1 &
for _ in $(seq 100); do
    sleep 0.1
    [[ $(wc -c <"$scratch/out") -gt 60 ]] && break
done
kill -INT $!
if wait $! && grep -q 'then interrupted' "$scratch/out"; then
    echo "ok: interrupted"
else
    echo "FAILED: an interrupt does not end in a report" && failed=1
fi
expect 0 '[0-9]+ of [0-9]+ layers answered' "$bin/verkv_evaluate" --model "$model" --text "$text" --prompt 256 --tokens 8 \
    --kept 1/4 --only water-filling --csv "$scratch/e.csv" --plot "$scratch/e.svg"
[[ -s $scratch/e.csv && -s $scratch/e.svg ]] || { echo "FAILED: no CSV or plot" && failed=1; }
expect 0 '16 of them read through verkv' "$bin/verkv_evaluate" --model "$model" --text "$text" --prompt 256 --tokens 4 \
    --reread 16 --kept 1/4 --only "never"
expect 0 'Dense greedy decoding gives the same' "$bin/verkv_lossless" --model "$model" --prompt "$text" --prompt-tokens 256 \
    --context 512 --predict 64 --chunk 6 --compare
expect 1 'nowhere/e.csv: cannot be written' "$bin/verkv_evaluate" --model "$model" --text "$text" --csv "$scratch/nowhere/e.csv"
expect 1 'is no regular expression' "$bin/verkv_evaluate" --model "$model" --text "$text" --only '('
# Said before a prompt is read.
generate 1 'a rotated sketch of 8 bits' --sketch rotated --bits 8
if [[ -e /dev/full ]]; then
    expect 1 'the standard output cannot be written' bash -c '"$@" >/dev/full' _ "$bin/verkv_generate" --model "$model" \
        --prompt "$scratch/short" --context 256 --predict 2
fi

# Models of random weights, one for each thing that models differ in.
python3 "$(dirname "${BASH_SOURCE[0]}")/tiny_models.py" "$scratch/tiny"
tiny() {
    expect "$1" "$2" "$bin/verkv_generate" --model "$scratch/tiny/$3.gguf" --prompt "$text" --prompt-tokens 200 \
        --context 256 --predict 12 "${@:4}"
}
for name in plain wide narrow layers_differ no_attention_in_layers latent no_rope; do
    # With all rows resident an output is off by the engine's own rounding, far below 1 %.
    tiny 0 '^all( +[0-9.]+){5} +0\.[0-9]+ ' "$name" --kept 1 --plan never --sketch exact
done
tiny 0 'Dense: logits are capped' capped
tiny 0 'Dense: attention has sinks' sinks
tiny 0 'Dense: positions enter the logits' alibi
tiny 0 'computed no flash attention' recurrent
tiny 1 'keeps no cache of its tokens' encoder
tiny 1 'has no vocabulary' no_vocabulary
tiny 1 'has no RoPE, knows positions of 256 only' no_rope --context 512
# The same text whatever the draft: here one of next to nothing, on models without RoPE, with windows, of latents.
for name in layers_differ no_rope capped latent; do
    expect 0 'Dense greedy decoding gives the same 56 tokens' "$bin/verkv_lossless" --model "$scratch/tiny/$name.gguf" \
        --prompt "$text" --prompt-tokens 200 --context 256 --predict 56 --chunk 5 --compare --plan never --sink 0 --local 0
done
exit $failed
