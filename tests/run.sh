#!/usr/bin/env bash
# Builds and runs the tests; installs what they need where packages are missing (Debian).
#     bash tests/run.sh          whether the library's results are right: minutes
#     bash tests/run.sh --all    everything, as CI does: with sanitizers, clang, lint, consumers, each benchmark once
# The last lines are ctest's summary; the exit code is 0 when every part passed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source cmake/packages.sh

all=
case "$*" in
    "") ;;
    --all) all=1 ;;
    *)
        echo "usage: bash tests/run.sh [--all]" >&2
        exit 2
        ;;
esac

results='^(unit|typed|property|golden|parity)$'
run_tests() { ctest --test-dir "$1" --parallel "$(nproc)" --output-on-failure --no-label-summary "${@:2}"; }

failed=()
part() {
    echo
    echo "=== $1"
    "${@:2}" || failed+=("$1")
}

need "${library_packages[@]}" "${example_packages[@]}" "${test_packages[@]}"
if [[ $all ]]; then
    need "${check_packages[@]}"
else
    cmake --preset release "${launcher[@]}" -D VERKV_WERROR=ON
    cmake --build build/release --target verkv_tests
    run_tests build/release -L "$results"
    exit
fi

# Warnings are errors; a part that does not build does not keep the others from being tested.
cmake --preset release "${launcher[@]}" -D VERKV_WERROR=ON -D VERKV_BUILD_BENCHMARKS=ON
part "build" cmake --build build/release -- -k 0

# With sanitizers, and for this machine's instruction set: build/release has the plain one. Of undefined behaviour, all
# but the checks of every single pointer: those make compiling three times as long, and AddressSanitizer sees most of it.
checks=address,shift,integer-divide-by-zero,signed-integer-overflow,pointer-overflow,bounds,bool,enum,return
checks+=,unreachable,builtin,nonnull-attribute,returns-nonnull-attribute
cmake --preset debug -B build/sanitize "${launcher[@]}" -D VERKV_NATIVE=ON -D VERKV_BUILD_EXAMPLES=OFF \
    -D VERKV_SANITIZE="$checks" -D CMAKE_CXX_FLAGS_DEBUG="-O1 -g1 -D_GLIBCXX_ASSERTIONS"
part "build with sanitizers" cmake --build build/sanitize --target verkv_sanitized -- -k 0
part "tests with sanitizers" run_tests build/sanitize -L '^unit$'

part "tests" run_tests build/release

# Inside a real engine: a build of llama.cpp and short runs of a small model, where both can be had.
part "llama.cpp" bash examples/llama_cpp/run.sh --check
if ((${#failed[@]})); then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
