#!/bin/bash
# Runs a command on a copy of this checkout in a folder with another Debian and its PostgreSQL, the extension installed:
#
#     scripts/debian_folder.sh 17 .venv/bin/python -m pytest tests/server/test_plan_search.py
#
# The major version chooses the Debian: 15 is Debian 12's, 17 Debian 13's, 18 its successor's, 19 in Debian's
# experimental. scripts/debian_folders.sh says how the folder is made and kept, 0.8 GB each.
#
# PL/Python is the folder's, the interpreter of tests and children is that of .venv: it is copied in with its standard
# library, and .venv lies at the same path as here. Only one copy is made of what a run changes: several runs may go on
# at the same time.
set -Eeuo pipefail
cd "$(dirname "$0")/.."
clone=$(pwd -P)
. scripts/debian_folders.sh

# The server's headers are unpacked, not installed: their package depends on clang and LLVM, which nothing here needs.
keep_folder_of_server() {
    local major=$1 headers=postgresql-server-dev-$1
    keep_folder "$(release "$major")-$major" "$major" "postgresql-$major,postgresql-plpython3-$major,gcc,libc6-dev,make,python3" \
        --customize-hook="chroot \"\$1\" sh -c 'cd /tmp && apt-get download -q $headers && dpkg --extract $headers*.deb / && rm $headers*.deb'" \
        --customize-hook="rm -rf \"\$1/var/lib/postgresql/$major\""
}

enter() {
    local venv python
    venv=$(realpath .venv)
    python=$(realpath .venv/bin/python)
    mkdir "$scratch/venv" "$scratch/venv-work"
    mkdir -p "$root$clone"
    # what git ignores stays behind: objects compiled here above all
    tar -c --exclude=.git --exclude-from=<(sed 's#/$##; s#^/#./#' .gitignore) . | tar -x --no-same-owner -C "$root$clone"
    lend_python "$python"
    mkdir -p "$root$venv"
    mount -t overlay -o "lowerdir=$venv,upperdir=$scratch/venv,workdir=$scratch/venv-work" overlay "$root$venv"
    ln -sfn "$python" "$root$venv/bin/python3"
    [ "$venv" = "$clone/.venv" ] || ln -s "$venv" "$root$clone/.venv"
    in_root PG_CONFIG="/usr/lib/postgresql/$major/bin/pg_config" \
        bash -c 'cd "$1" && shift && make -s -j"$(nproc)" all && make -s install && "$@"' bash "$clone" "$@"
}

[ $# -ge 2 ] || die "a major version of PostgreSQL and a command are needed" "$0 17 .venv/bin/python -m pytest tests/server"
major=$1
[ -x .venv/bin/python ] || die ".venv is missing" "Run scripts/setup.sh first."
become_root "$@"
shift
keep_folder_of_server "$major"
export clone major
export -f enter
in_folder enter "$@"
