#!/usr/bin/env bash
# Builds the examples for this machine, installing what they need where packages are missing (Debian), runs the small
# ones, and ends with the table of 01_verify_decode. Arguments go to verify_decode: bash examples/run.sh --kept 1/8
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
source "$here/cmake/packages.sh"

need "${library_packages[@]}" "${example_packages[@]}"
build=$here/build/examples
cmake -S "$here" -B "$build" -G Ninja "${launcher[@]}" -D CMAKE_BUILD_TYPE=Release -D VERKV_NATIVE=ON \
    -D VERKV_BUILD_TESTS=OFF
small=(building_blocks own_scorer_and_sketch engine_loop c_interface)
cmake --build "$build" --target "${small[@]}" verify_decode

for example in "${small[@]}"; do
    echo
    echo "=== $example"
    "$build/bin/$example"
done
echo
echo "=== verify_decode (also as JSON and as a plot: $build/verify_decode.json, .svg)"
"$build/bin/verify_decode" --json "$build/verify_decode.json" --plot "$build/verify_decode.svg" "$@"
