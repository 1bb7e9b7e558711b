# shellcheck shell=bash
# Folders with a Debian, and commands in them, read by the scripts that use some: debian_folder.sh, packages.sh.
#
# mmdebstrap makes a folder out of packages of the mirror that this machine's apt uses; it is kept in
# /var/cache/pg_tensile (PG_TENSILE_CACHE) and made again when it is removed or what it is made of changes. A command
# runs on a layer over it that is removed at the end. Mounts and processes are in namespaces of their own, and so end
# with the command, even one that is killed. Needs Debian and root; no init, no container engine.

cache=${PG_TENSILE_CACHE:-/var/cache/pg_tensile}
. scripts/debian_sources.sh

say() { echo "${0##*/}: $*" >&2; }
die() {
    echo "${0##*/}: $1" >&2
    echo "hint: $2" >&2
    exit 1
}

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

# What a folder is made of.
recipe() {
    echo "$@"
    declare -f make_folder
}

# make_folder FOLDER MAJOR PACKAGES OPTION…: the Debian that has PostgreSQL MAJOR, with these packages, separated by
# commas, and options of mmdebstrap.
make_folder() {
    local folder=$1 major=$2 packages=$3 release base log=$1.log
    release=$(release "$major")
    base=$release
    local options=(--variant=minbase --include="$packages" --aptopt='Acquire::Languages "none"' "${@:4}")
    mapfile -t -O ${#options[@]} options < <(debian_options)
    command -v mmdebstrap >/dev/null ||
        { apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends mmdebstrap; } >&2
    if [ "$release" = experimental ]; then
        # on top of unstable: nothing but PostgreSQL is taken from experimental
        base=sid
        options+=(--setup-hook="printf 'Package: src:postgresql-$major\nPin: release a=experimental\nPin-Priority: 500\n' >\"\$1/etc/apt/preferences.d/experimental\"")
    fi
    say "making $folder: Debian $release with $packages (once; its log is $log)"
    rm -rf --one-file-system "$folder" "$folder.new"
    { debian_sources $base; [ "$base" = "$release" ] || debian_sources "$release"; } >"$folder.sources"
    mmdebstrap "${options[@]}" "$base" "$folder.new" - <"$folder.sources" >"$log" 2>&1 || {
        tail -n 20 "$log" >&2
        die "mmdebstrap could not make it" "Its last lines are above."
    }
    recipe "$@" >"$folder.new/.pg_tensile-recipe"
    mv "$folder.new" "$folder"
}

# keep_folder NAME …: the folder of this name in the cache, made with the arguments of make_folder unless it is there.
keep_folder() {
    folder=$cache/$1
    mkdir -p "$cache"
    exec 8>"$folder.lock"
    flock 8
    [ "$(cat "$folder/.pg_tensile-recipe" 2>/dev/null)" = "$(recipe "$folder" "${@:2}")" ] || make_folder "$folder" "${@:2}"
    exec 8>&-
}

# Scratch folders of runs that were killed.
remove_leftovers() {
    local left
    for left in "$cache"/run-*; do
        [ -d "$left" ] && flock --nonblock "$left" rm -rf --one-file-system "$left" || true
    done
}

# Mounts $root: the folder below a layer for changes, and what programs expect of a machine.
mount_root() {
    mkdir "$root" "$scratch/changes" "$scratch/work" "$scratch/tmp"
    chmod 755 "$scratch/changes" # of the root folder
    chmod 1777 "$scratch/tmp"
    mount -t overlay -o "lowerdir=$folder,upperdir=$scratch/changes,workdir=$scratch/work" overlay "$root"
    mount -t proc proc "$root/proc"
    mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs tmpfs "$root/dev/shm"
    mount --bind "$scratch/tmp" "$root/tmp"
    cp /etc/resolv.conf /etc/hosts "$root/etc"
}

# Lends the interpreter $1 of this machine with its standard library, unless one is there.
lend_python() {
    local python=$1 library
    [ ! -e "$root$python" ] || return 0
    library=$("$python" -I -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
    cp "$python" "$root$python"
    mkdir -p "$root$library"
    mount --bind "$library" "$root$library"
}

# A command in $root, with the variables NAME=VALUE that come before it.
in_root() {
    chroot "$root" env -i HOME=/root LANG=C.UTF-8 TERM="${TERM:-dumb}" \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$@"
}

# in_folder FUNCTION ARGUMENT…: runs a function, as process 1 of namespaces of its own, in which $root is a copy of
# $folder that may be changed. The function and what it uses have to be exported.
in_folder() {
    local status=0
    remove_leftovers
    scratch=$(mktemp -d "$cache/run-XXXXXX")
    root=$scratch/root
    exec 9<"$scratch"
    flock 9
    trap 'rm -rf --one-file-system "$scratch"' EXIT
    export scratch root folder
    export -f mount_root lend_python in_root
    # not exec: process 1 is to be a shell, which inherits and reaps orphans
    unshare --mount --propagation private --pid --fork --kill-child \
        bash -Eeuo pipefail -c 'mount_root; "$@"' bash "$@" || status=$?
    rm -rf --one-file-system "$scratch"
    return $status
}

become_root() {
    [ "$(id -u)" != 0 ] || return 0
    command -v sudo >/dev/null || die "this needs root or sudo" "Run it as root."
    exec sudo -E "$0" "$@"
}
