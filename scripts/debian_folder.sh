#!/bin/bash
# Runs a command on a copy of this checkout in a folder with another Debian and its PostgreSQL, the extension installed:
#
#     scripts/debian_folder.sh 17 .venv/bin/python -m pytest tests/server/test_plan_search.py
#
# The major version chooses the Debian: 15 is Debian 12's, 17 Debian 13's, 18 its successor's, 19 in Debian's
# experimental. mmdebstrap makes the folder out of packages of the mirror that this machine's apt uses; it is kept in
# /var/cache/pg_tensile (PG_TENSILE_CACHE), 0.8 GB each, and made again when it is removed or the packages below change.
#
# PL/Python is the folder's, the interpreter of tests and children is that of .venv: it is copied in with its standard
# library, and .venv lies at the same path as here. All changes go into a layer that is removed at the end. Mounts and
# processes are in namespaces of their own, and so end with the command, even one that is killed.
#
# Needs Debian, and root or sudo; no init, no container engine. Only one copy is made of what a run changes: several
# runs may go on at the same time.
set -Eeuo pipefail
cd "$(dirname "$0")/.."
clone=$(pwd -P)
cache=${PG_TENSILE_CACHE:-/var/cache/pg_tensile}
. scripts/debian_sources.sh

say() { echo "debian-folder: $*" >&2; }
die() {
    echo "debian-folder: $1" >&2
    echo "hint: $2" >&2
    exit 1
}

# ---- the folder -----------------------------------------------------------------------------------------------------

# The Debian whose own packages have PostgreSQL $1.
release() {
    case $1 in
        15) echo bookworm ;;
        17) echo trixie ;;
        18) echo forky ;;
        19) echo experimental ;;
        *) die "no Debian is known to have PostgreSQL $1" "Give 15, 17, 18 or 19." ;;
    esac
}

packages() { echo "postgresql-$1,postgresql-plpython3-$1,gcc,libc6-dev,make,python3"; }

# What the folder is made of.
recipe() {
    echo "$1 $2 $(packages "$1")"
    declare -f make_folder
}

# The server's headers are unpacked, not installed: their package depends on clang and LLVM, which nothing here needs.
make_folder() {
    local major=$1 release=$2 folder=$3 base=$2 headers=postgresql-server-dev-$1 log
    log=$folder.log
    local options=(--variant=minbase --include="$(packages "$major")" --aptopt='Acquire::Languages "none"'
        --customize-hook="chroot \"\$1\" sh -c 'cd /tmp && apt-get download -q $headers && dpkg --extract $headers*.deb / && rm $headers*.deb'"
        --customize-hook="rm -rf \"\$1/var/lib/postgresql/$major\"")
    mapfile -t -O ${#options[@]} options < <(debian_options)
    command -v mmdebstrap >/dev/null ||
        { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends mmdebstrap; } >&2
    if [ "$release" = experimental ]; then
        # on top of unstable: nothing but PostgreSQL is taken from experimental
        base=sid
        options+=(--setup-hook="printf 'Package: src:postgresql-$major\nPin: release a=experimental\nPin-Priority: 500\n' >\"\$1/etc/apt/preferences.d/experimental\"")
    fi
    say "making $folder: Debian $release with PostgreSQL $major (once; its log is $log)"
    rm -rf --one-file-system "$folder" "$folder.new"
    mkdir -p "$cache"
    { debian_sources $base; [ "$base" = "$release" ] || debian_sources "$release"; } >"$folder.sources"
    mmdebstrap "${options[@]}" "$base" "$folder.new" - <"$folder.sources" >"$log" 2>&1 || {
        tail -n 20 "$log" >&2
        die "mmdebstrap could not make it" "Its last lines are above."
    }
    recipe "$major" "$release" >"$folder.new/.pg_tensile-recipe"
    mv "$folder.new" "$folder"
}

# ---- a command in it ------------------------------------------------------------------------------------------------

# In namespaces of its own, as process 1.
enter() {
    local root=$scratch/root venv python
    venv=$(realpath .venv)
    python=$(realpath .venv/bin/python)
    mkdir "$scratch/root" "$scratch/changes" "$scratch/work" "$scratch/venv" "$scratch/venv-work" "$scratch/tmp"
    chmod 755 "$scratch/changes" # of the root folder
    chmod 1777 "$scratch/tmp"
    mount -t overlay -o "lowerdir=$folder,upperdir=$scratch/changes,workdir=$scratch/work" overlay "$root"
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs tmpfs "$root/dev/shm"
    mount --bind "$scratch/tmp" "$root/tmp"
    cp /etc/resolv.conf /etc/hosts "$root/etc"

    mkdir -p "$root$clone"
    # what git ignores stays behind: objects compiled here above all
    tar -c --exclude=.git --exclude-from=<(sed 's#/$##; s#^/#./#' .gitignore) . | tar -x --no-same-owner -C "$root$clone"

    if [ ! -e "$root$python" ]; then
        local library
        library=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
        cp "$python" "$root$python"
        mkdir -p "$root$library"
        mount --bind "$library" "$root$library"
    fi
    mkdir -p "$root$venv"
    mount -t overlay -o "lowerdir=$venv,upperdir=$scratch/venv,workdir=$scratch/venv-work" overlay "$root$venv"
    ln -sfn "$python" "$root$venv/bin/python3"
    [ "$venv" = "$clone/.venv" ] || ln -s "$venv" "$root$clone/.venv"

    # not exec: process 1 is to be a shell, which inherits and reaps orphans
    chroot "$root" env -i HOME=/root LANG=C.UTF-8 TERM="${TERM:-dumb}" \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin PG_CONFIG="/usr/lib/postgresql/$major/bin/pg_config" \
        bash -c 'cd "$1" && shift && make -s -j"$(nproc)" all && make -s install && "$@"' bash "$clone" "$@"
}

# Scratch folders of runs that were killed.
remove_leftovers() {
    local left
    for left in "$cache"/run-*; do
        [ -d "$left" ] && flock --nonblock "$left" rm -rf --one-file-system "$left" || true
    done
}

[ $# -ge 2 ] || die "a major version of PostgreSQL and a command are needed" "$0 17 .venv/bin/python -m pytest tests/server"
major=$1
shift
release=$(release "$major")
[ -x .venv/bin/python ] || die ".venv is missing" "Run scripts/setup.sh first."
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "this needs root or sudo" "Run it as root."
    exec sudo -E "$0" "$major" "$@"
fi
folder=$cache/$release-$major
mkdir -p "$cache"
exec 8>"$folder.lock"
flock 8
[ "$(cat "$folder/.pg_tensile-recipe" 2>/dev/null)" = "$(recipe "$major" "$release")" ] || make_folder "$major" "$release" "$folder"
exec 8>&-
remove_leftovers
scratch=$(mktemp -d "$cache/run-XXXXXX")
exec 9<"$scratch"
flock 9
trap 'rm -rf --one-file-system "$scratch"' EXIT
export scratch folder clone major
export -f enter
status=0
unshare --mount --propagation private --pid --fork --kill-child \
    bash -Eeuo pipefail -c 'enter "$@"' bash "$@" || status=$?
exit $status
