#!/bin/bash
# Runs a command that writes into PostgreSQL's folders: as it is when they can be written, else with sudo.
set -eu
if [ -w "$(${PG_CONFIG:-pg_config} --pkglibdir)" ] && [ -w "$(${PG_CONFIG:-pg_config} --sharedir)/extension" ]; then
    exec "$@"
fi
command -v sudo >/dev/null || { echo "$0: installing the extension needs root or sudo" >&2; exit 1; }
exec sudo "$@"
