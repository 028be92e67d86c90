#!/usr/bin/env bash
# Kernels on a real device: their tests, the same under compute-sanitizer, and the benchmark. Writes JSON.
#     bash tests/gpu/run.sh [--build DIR] [--json FILE]    builds and runs; default build/gpu and DIR/gpu.json
#     bash tests/gpu/run.sh --build-only --arch 90         where nvcc is and no device
#     bash tests/gpu/run.sh --run-only                     where the device is; DIR comes from --build-only
# Exit code: 0 all passed, 1 something failed, 77 skipped (no device, or no nvcc to build with).
# Needs nvcc, g++, Eigen, Random123 and Catch2 to build; nothing but the driver to run. CPATH may hold folders of headers.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

build=build/gpu
json=
arch=
steps="build run"
while (($#)); do
    case "$1" in
        --build) build=$2 && shift ;;
        --json) json=$2 && shift ;;
        --arch) arch=$2 && shift ;;
        --build-only) steps=build ;;
        --run-only) steps=run ;;
        *)
            echo "usage: bash tests/gpu/run.sh [--build DIR] [--json FILE] [--arch NN] [--build-only | --run-only]" >&2
            exit 2
            ;;
    esac
    shift
done
json=${json:-$build/gpu.json}
mkdir -p "$build" "$(dirname "$json")"
rm -f "$json"

skip() {
    echo "skipped: $*"
    exit 77
}
fail() {
    echo "FAILED: $*" >&2
    exit 1
}

nvcc=$(command -v nvcc || echo "${CUDA_PATH:-/usr/local/cuda}/bin/nvcc")
nvcc_flags=(-std=c++20 -O2 -Iinclude -Itests -Werror=all-warnings)

# --- Is there a device? Files first: a machine without any is told so in no time.
if [[ $steps == *run* ]]; then
    compgen -G "/dev/nvidiactl" >/dev/null || compgen -G "/dev/dxg" >/dev/null || compgen -G "/dev/nvhost-ctrl*" >/dev/null ||
        skip "no device"
fi
if [[ $steps == *build* ]]; then
    [[ -x $nvcc ]] || skip "no nvcc"
    "$nvcc" "${nvcc_flags[@]}" tests/gpu/device_query.cu -o "$build/device_query" || fail "the device query does not build"
fi
device=null
if [[ $steps == *run* ]]; then
    device=$("$build/device_query")
    case $? in
        0) ;;
        77) skip "no device" ;;
        *) fail "the device query" ;;
    esac
    echo "device: $device"
    [[ $device =~ \"compute_capability\":\ ([0-9]+) ]] && arch=${arch:-${BASH_REMATCH[1]}}
fi

# --- Build: the kernels by nvcc; their tests, as ctest has them for the emulator, by g++.
if [[ $steps == *build* ]]; then
    code=(-gencode "arch=compute_${arch:-90},code=sm_${arch:-90}")
    "$nvcc" "${nvcc_flags[@]}" "${code[@]}" -lineinfo -c tests/cuda/kernels.cu -o "$build/kernels.o" ||
        fail "the kernels do not build"
    "$nvcc" "${nvcc_flags[@]}" "${code[@]}" tests/gpu/benchmark.cu "$build/kernels.o" -o "$build/benchmark" ||
        fail "the benchmark does not build"
    toolkit=$(dirname "$(dirname "$(readlink -f "$nvcc")")")
    flags=(-std=c++20 -O1 -Iinclude -Itests -Iexamples -isystem "$toolkit/include" -isystem /usr/include/eigen3
        -DVERKV_TEST_ON_DEVICE "-DVERKV_EXAMPLE_DATA_DIR=\"$PWD/examples/data\"" "-DVERKV_TEST_DATA_DIR=\"$PWD/tests/golden\"")
    objects=()
    for source in tests/support/*.cpp $(grep -l '^#include "support/device.hpp"' tests/parity/*.cpp); do
        object=$build/$(basename "$source").o
        ${CXX:-g++} "${flags[@]}" -c "$source" -o "$object" || fail "$source does not build"
        objects+=("$object")
    done
    "$nvcc" "${code[@]}" "${objects[@]}" "$build/kernels.o" -Xcompiler -static-libstdc++,-static-libgcc -o "$build/parity" ||
        fail "the tests do not link"
fi
if [[ $steps != *run* ]]; then
    echo "built for sm_${arch:-90} in $build; where the device is: bash tests/gpu/run.sh --run-only --build $build"
    exit 0
fi

# --- Run. Every part runs, whatever the one before it said.
failed=0
# part NAME LIMIT_S COMMAND...: prints the output, and leaves {"passed": ..., "seconds": ...} in $result.
part() {
    local name=$1 limit=$2 start end code
    shift 2
    echo "=== $name"
    start=$(date +%s.%N)
    timeout "$limit" "$@" 2>&1 | tee "$build/$name.log" | tail -n 40
    code=${PIPESTATUS[0]}
    end=$(date +%s.%N)
    local passed=true
    if ((code != 0)); then
        passed=false
        failed=1
        echo "FAILED: $name (exit code $code)"
    fi
    result=$(printf '{"passed": %s, "exit_code": %d, "seconds": %.1f}' "$passed" "$code" "$(echo "$end $start" | awk '{print $1 - $2}')")
}

part parity 120 "$build/parity"
parity=$result

sanitizer=$(command -v compute-sanitizer || echo "${CUDA_PATH:-/usr/local/cuda}/bin/compute-sanitizer")
sanitized=
if [[ -x $sanitizer ]]; then
    for tool in memcheck racecheck initcheck synccheck; do
        part "$tool" 90 "$sanitizer" --tool "$tool" --error-exitcode 9 "$build/parity" "~[slow]"
        sanitized+="${sanitized:+, }\"$tool\": $result"
    done
else
    echo "=== compute-sanitizer is MISSING: nothing is checked with it"
fi

rm -f "$build/benchmark.json"
part benchmark 120 "$build/benchmark" "$build/benchmark.json"
benchmark=$(cat "$build/benchmark.json" 2>/dev/null || echo null)

commit=$(git describe --always --dirty 2>/dev/null || echo unknown)
printf '{\n"commit": "%s",\n"device": %s,\n"parity": %s,\n"sanitizer": {%s},\n"benchmark_run": %s,\n"benchmark": %s,\n"passed": %s\n}\n' \
    "$commit" "$device" "$parity" "$sanitized" "$result" "$benchmark" "$( ((failed)) && echo false || echo true)" >"$json"
echo "=== $json"
if ((failed)); then
    exit 1
fi
echo "all passed"
