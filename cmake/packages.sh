# shellcheck shell=bash disable=SC2034
# Sourced by tests/run.sh and examples/run.sh.
library_packages=(cmake g++ ninja-build libeigen3-dev librandom123-dev)
example_packages=(libcli11-dev libfmt-dev nlohmann-json3-dev)
test_packages=(catch2 libboost-context-dev)
check_packages=(libbenchmark-dev clang clang-format clang-tidy)

# need PACKAGE...: installs the Debian packages among these that are missing; where there is no apt, says which they are
# and lets the build find out.
need() {
    if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
        echo "Not a Debian system: install what these Debian packages hold, if you have not yet: $*"
        return 0
    fi
    local missing=() package
    for package in "$@"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
    done
    ((${#missing[@]})) || return 0
    echo "Installing: ${missing[*]}"
    local as_root=()
    if ((EUID != 0)); then
        if ! command -v sudo >/dev/null; then
            echo "Neither root nor sudo here; as root, run: apt-get install ${missing[*]}" >&2
            return 1
        fi
        as_root=(sudo)
    fi
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
}

# Compile through ccache where there is one.
launcher=()
if command -v ccache >/dev/null; then
    launcher=(-D CMAKE_CXX_COMPILER_LAUNCHER=ccache)
fi
