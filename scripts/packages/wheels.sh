# shellcheck shell=bash
# The wheels of the children's environment, for scripts that make it in a folder of a Debian.
#
# Exports `python`, this machine's interpreter, and by fetch_wheels `wheels`, a folder of the cache (PG_TENSILE_WHEELS names
# another one). The wheels are for this interpreter, and fetched once, and again when the lock file changes.

python=$(realpath /usr/bin/python3)
export python

fetch_wheels() {
    wheels=${PG_TENSILE_WHEELS:-$cache/wheels}
    export wheels
    [ -z "${PG_TENSILE_WHEELS:-}" ] || return 0
    mkdir -p "$cache"
    exec 7>"$cache/wheels.lock"
    flock 7
    if ! cmp -s requirements.lock "$wheels/requirements.lock"; then
        rm -rf "$wheels"
        "$python" -m scripts.pg_tensile_setup --cpu --python "$python" --download "$wheels"
        cp requirements.lock "$wheels"
    fi
    exec 7>&-
}

