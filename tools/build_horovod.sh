#!/usr/bin/env bash
# Compiles Horovod for horovod.torch, with gloo and without MPI, into a wheel. Its last release came before the C++ and
# CMake that today's torch needs, so both are told to bear with it:
#
#   tools/build_horovod.sh PYTHON FOLDER    PYTHON has torch installed; the wheel goes to FOLDER
#
# It takes about 9 minutes on two cores; JOBS=1 is kinder to a busy machine.
set -euo pipefail

python=$(realpath --no-symlinks "$1")
folder=$2
version=0.28.1
here=$(cd "$(dirname "$0")/.." && pwd)

work=$(mktemp --directory)
trap 'rm -rf "$work"' EXIT

# The tools of the build stay out of the environment in which the wheel is used.
"$python" -m pip install --quiet --disable-pip-version-check --constraint "$here/constraints.txt" \
    --target "$work/tools" 'cmake<4' packaging 'setuptools<81' wheel

# Horovod's CMake file asks for C++14, which torch's headers refuse, and some of its headers forgot <cstdint>. What
# comes last on the command line counts.
cat >"$work/c++" <<WRAPPER
#!/bin/sh
exec "${CXX:-g++}" "\$@" -std=c++20 -include cstdint
WRAPPER
chmod +x "$work/c++"

# No cache: pip would take a wheel from there that fits another torch.
mkdir -p "$folder"
env CXX="$work/c++" \
    PATH="$work/tools/bin:$PATH" \
    PYTHONPATH="$work/tools" \
    CMAKE_POLICY_VERSION_MINIMUM=3.5 \
    MAKEFLAGS="-j${JOBS:-$(nproc)}" \
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 \
    HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITHOUT_MPI=1 \
    "$python" -m pip wheel --disable-pip-version-check --no-cache-dir --no-build-isolation --no-deps \
    --wheel-dir "$folder" "horovod==$version"
