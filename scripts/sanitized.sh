#!/bin/bash
# Runs a command on a copy of this checkout with a PostgreSQL that finds errors of memory:
#
#     scripts/sanitized.sh .venv/bin/python -m pytest tests/server/test_predict.py
#
# PostgreSQL 15 of Debian's sources, with assertions and AddressSanitizer: what palloc has not given out is poisoned, as
# for Valgrind (valgrind/ below makes its requests AddressSanitizer's). The extension has UndefinedBehaviorSanitizer
# besides. A process that errs ends with SIGABRT, and a report is printed at the end, whatever the tests made of it.
#
# The server is built once, in minutes, and kept in /var/cache/pg_tensile (PG_TENSILE_CACHE), 150 MB. Needs Debian 12, and
# root or sudo for the compiler's packages.
set -Eeuo pipefail
cd "$(dirname "$0")/.."
clone=$(pwd -P)
cache=${PG_TENSILE_CACHE:-/var/cache/pg_tensile}
server=$cache/sanitized-15
. scripts/debian_sources.sh

say() { echo "sanitized: $*" >&2; }

[ $# -ge 1 ] || { echo "usage: $0 COMMAND …" >&2; exit 2; }
[ -x .venv/bin/python ] || { echo "$0: .venv is missing: run scripts/setup.sh test" >&2; exit 2; }
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "$0: this needs root or sudo" >&2; exit 2; }
    exec sudo -E "$0" "$@"
fi

# ---- the server -----------------------------------------------------------------------------------------------------

# The sources as Debian has them from PostgreSQL, without Debian's patches, in the present folder: those of the release,
# which a mirror always has, not of its security updates.
fetch_sources() {
    local options=(-o Dir::State::lists="$PWD/lists" -o Dir::Etc::sourcelist="$PWD/sources" -o Dir::Etc::sourceparts=-)
    debian_sources bookworm | sed -n 's/^deb \(.* bookworm main\)$/deb-src \1/p' >sources
    mkdir -p lists/partial
    apt-get update -q "${options[@]}"
    apt-get source -q --download-only --tar-only "${options[@]}" postgresql-15
    tar -xf postgresql-15_*.orig.tar.*
}

# The header that PostgreSQL includes when it is built for Valgrind. Chunks are poisoned again where they are wiped, which
# builds with assertions do.
write_valgrind() {
    mkdir -p valgrind
    cat >valgrind/memcheck.h <<'END'
#include <sanitizer/asan_interface.h>
#define VALGRIND_MAKE_MEM_DEFINED(address, size) ASAN_UNPOISON_MEMORY_REGION(address, size)
#define VALGRIND_MAKE_MEM_UNDEFINED(address, size) ASAN_UNPOISON_MEMORY_REGION(address, size)
#define VALGRIND_MAKE_MEM_NOACCESS(address, size) ASAN_POISON_MEMORY_REGION(address, size)
#define VALGRIND_CHECK_MEM_IS_DEFINED(address, size) ((void) 0)
#define VALGRIND_CREATE_MEMPOOL(pool, redzone, zeroed) ((void) 0)
#define VALGRIND_DESTROY_MEMPOOL(pool) ((void) 0)
#define VALGRIND_MEMPOOL_ALLOC(pool, address, size) ASAN_UNPOISON_MEMORY_REGION(address, size)
#define VALGRIND_MEMPOOL_FREE(pool, address) ((void) 0)
#define VALGRIND_MEMPOOL_CHANGE(pool, old, address, size) ASAN_UNPOISON_MEMORY_REGION(address, size)
#define VALGRIND_MEMPOOL_TRIM(pool, address, size) ((void) 0)
END
    cat >valgrind/valgrind.h <<'END'
#define VALGRIND_COUNT_ERRORS 0
#define RUNNING_ON_VALGRIND 0
#define VALGRIND_PRINTF(...) ((void) 0)
END
}

build_server() {
    local build
    say "building PostgreSQL 15 in $server (once; its log is $server.log)"
    build=$(mktemp -d "$cache/build-XXXXXX")
    cd "$build"
    apt-get update -q
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends gcc make pkg-config libc6-dev \
        libpython3-dev libxml2-dev zlib1g-dev
    fetch_sources
    write_valgrind
    cd postgresql-15*/
    ./configure -q --prefix="$server" --enable-cassert --enable-debug --with-python --with-libxml --without-readline \
        CFLAGS='-O1 -g -fno-omit-frame-pointer -fsanitize=address' CPPFLAGS="-DUSE_VALGRIND -I$build" \
        PYTHON=/usr/bin/python3
    make -s -j"$(nproc)"
    make -s install
    make -s -C contrib install
    # pg_tensile_evaluator.so is loaded into a Python without sanitizers, so what it is linked with has none either
    sed -i 's/ -fsanitize=address//' src/Makefile.global
    for part in port common; do
        make -s -C src/$part clean
        make -s -C src/$part install
    done
    cp -r "$build/valgrind" "$("$server/bin/pg_config" --includedir-server)"
    cd "$clone"
    rm -rf "$build"
    declare -f build_server write_valgrind >"$server/recipe"
}

# PostgreSQL's programs free little before they end
export ASAN_OPTIONS=detect_leaks=0
mkdir -p "$cache"
exec 8>"$server.lock"
flock 8
if [ "$(cat "$server/recipe" 2>/dev/null)" != "$(declare -f build_server write_valgrind)" ]; then
    rm -rf "$server"
    # waited for, as bash goes on after errors in what is followed by ||
    (build_server) >"$server.log" 2>&1 &
    wait $! || { tail -n 20 "$server.log" >&2; say "it could not be built"; exit 1; }
fi
exec 8>&-

# ---- the extension, and the command ---------------------------------------------------------------------------------

scratch=$(mktemp -d /var/tmp/pgt-sanitized-XXXXXX)
trap 'rm -rf "$scratch"' EXIT
mkdir -m 1777 "$scratch/reports"
mkdir "$scratch/clone"
chmod 755 "$scratch"
tar -c --exclude=.git --exclude-from=<(sed 's#/$##; s#^/#./#' .gitignore) . | tar -x --no-same-owner -C "$scratch/clone"
ln -s "$(realpath .venv)" "$scratch/clone/.venv"
cd "$scratch/clone"
export PG_CONFIG=$server/bin/pg_config
# types are read at addresses that C calls unaligned
sanitize="-fsanitize=undefined -fno-sanitize=alignment -fno-sanitize-recover=undefined"
make -s -j"$(nproc)" all COPT="$sanitize" LDFLAGS_SL="-fsanitize=address,undefined"
make -s install COPT="$sanitize"
export ASAN_OPTIONS="$ASAN_OPTIONS:abort_on_error=1:log_path=$scratch/reports/asan"
export UBSAN_OPTIONS="abort_on_error=1:print_stacktrace=1:log_path=$scratch/reports/ubsan"
status=0
"$@" || status=$?
for report in "$scratch"/reports/*; do
    [ -e "$report" ] || continue
    status=1
    cat "$report"
done
exit $status
