#!/bin/bash
# Builds the Python distribution: the sdist, and from it the wheel.
#
#     scripts/wheel.sh FOLDER    writes both to FOLDER
#
# It builds in copies, because setuptools leaves files where it builds, which later builds would take along. Without
# .venv it needs python3 with venv, and a network for setuptools.
set -eu -o pipefail
umask 022
folder=$(realpath -m "$1")
cd "$(dirname "$0")/.."
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

python=$PWD/.venv/bin/python
if ! "$python" -c 'import setuptools as s; assert int(s.__version__.split(".")[0]) >= 77' 2>/dev/null; then
    python=$scratch/venv/bin/python
    python3 -m venv "$scratch/venv"
    "$python" -m pip install -qq --disable-pip-version-check --upgrade setuptools
fi

# Call a function of the build backend in a folder of sources; its last line is the name of the file that it has written.
build() {
    local call="import sys; from setuptools import build_meta; print(build_meta.$2(sys.argv[1]))"
    (cd "$1" && "$python" -c "$call" "$folder") >"$scratch/log" 2>&1 || { cat "$scratch/log" >&2; exit 1; }
    tail -n 1 "$scratch/log"
}

mkdir -p "$folder" "$scratch/clone" "$scratch/sdist"
tar cf - --exclude=__pycache__ --exclude=csrc pyproject.toml README.md LICENSE pg_tensile pyworker |
    tar xf - --no-same-owner -C "$scratch/clone"
sdist=$(build "$scratch/clone" build_sdist)
tar xf "$folder/$sdist" --no-same-owner --strip-components=1 -C "$scratch/sdist"
wheel=$(build "$scratch/sdist" build_wheel)
echo "$folder/$sdist"
echo "$folder/$wheel"
