#!/bin/bash
# Sets up what is missing: Debian packages and the virtual environment .venv.
#
#     scripts/setup.sh         to compile, install and use the extension, and for the demo
#     scripts/setup.sh test    for tests, lint and benchmarks too: Chromium, and the packages of requirements-test.txt
#
# The C compiler is for the extension. (On a GPU, Triton compiles kernels of compressed swaps with it, too.)
#
# Safe beside a PostgreSQL that runs: Debian's own cluster is neither created, changed nor restarted. The venv is made
# from /usr/bin/python3, because the server's user cannot enter interpreters under a home directory; when it cannot
# enter this clone either, the venv lies in /var/lib/pg_tensile and .venv is a link to it. The second run takes 0.1 s.
set -eu -o pipefail
umask 022
cd "$(dirname "$0")/.."
clone=$(pwd -P)
minimum=15
case ${1:-} in
    '') requirements=(requirements.txt) ;;
    test) requirements=(requirements.txt requirements-test.txt) ;;
    *) echo "setup: unknown argument: $1" >&2; exit 1 ;;
esac

for_tests() { [ ${#requirements[@]} = 2 ]; }

say() { echo "setup: $*"; }
die() { echo "setup: $1" >&2; [ $# -lt 2 ] || echo "hint: $2" >&2; exit 1; }

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    elif command -v sudo >/dev/null; then
        sudo "$@"
    else
        die "this needs root or sudo: $*"
    fi
}

# ---- Debian packages ------------------------------------------------------------------------------------------------

pg_config=${PG_CONFIG:-pg_config}

headers_installed() { [ -e "$($pg_config --includedir-server 2>/dev/null)/postgres.h" ]; }

# The major version to use: that of the server headers which are there, else the newest installed server, else Debian's.
pg_major() {
    local version
    if headers_installed; then
        version=$($pg_config --version | sed -E 's/^PostgreSQL ([0-9]+).*/\1/')
    else
        version=$(find /usr/lib/postgresql -path '*/bin/postgres' 2>/dev/null | cut -d/ -f5 | sort -n | tail -1)
    fi
    [ -n "$version" ] || version=$(apt-cache depends postgresql 2>/dev/null | sed -nE 's/.*Depends: postgresql-([0-9]+).*/\1/p' | head -1)
    echo "$version"
}

server_complete() {
    headers_installed && [ -x "$($pg_config --bindir)/initdb" ] &&
        [ -e "$($pg_config --sharedir)/extension/plpython3u.control" ] && [ -e "$($pg_config --pkglibdir)/plpython3.so" ]
}

# What apt has to install, one name a line; nothing when all is there.
missing_packages() {
    local major=$1
    command -v gcc >/dev/null || echo gcc
    command -v make >/dev/null || echo make
    /usr/bin/python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3-venv
    # the tests look at reports with it
    ! for_tests || command -v chromium >/dev/null || command -v chromium-headless-shell >/dev/null || echo chromium
    if ! server_complete; then
        [ -x "/usr/lib/postgresql/$major/bin/initdb" ] || echo "postgresql-$major"
        [ -e "/usr/lib/postgresql/$major/lib/plpython3.so" ] || echo "postgresql-plpython3-$major"
        [ -e "/usr/include/postgresql/$major/server/postgres.h" ] || echo "postgresql-server-dev-$major"
    fi
}

# apt-get shows percentages on a terminal. A log gets lines: how much there is to fetch, then package by package.
quiet=()
[ -t 1 ] || quiet=(-q)

apt_install() {
    as_root env DEBIAN_FRONTEND=noninteractive NEEDRESTART_SUSPEND=1 \
        apt-get install -y "${quiet[@]}" --no-install-recommends "$@"
}

# Debian creates and starts a cluster named "main" with the first server package; we need none, so it is told not to.
without_main_cluster() {
    local configuration=/etc/postgresql-common/createcluster.conf status=0
    apt_install postgresql-common
    as_root cp -p $configuration $configuration.before-pg_tensile
    echo "create_main_cluster = false" | as_root tee -a $configuration >/dev/null
    "$@" || status=$?
    as_root mv $configuration.before-pg_tensile $configuration
    return $status
}

# Any process of the server's program, whoever owns it. (A minimal Debian has no pgrep.)
server_runs() { grep -aqs "^/usr/lib/postgresql/$1/bin/postgres" /proc/[0-9]*/cmdline; }

install_packages() {
    local major=$1
    shift
    [ -e /etc/debian_version ] && command -v apt-get >/dev/null ||
        die "this is not Debian, and these are missing: $*" \
            "install PostgreSQL $minimum or later with PL/Python and its headers, gcc, make and Python's venv; then run again (PG_CONFIG=… chooses a server)"
    [ "$(id -u)" = 0 ] || command -v sudo >/dev/null ||
        die "these Debian packages are missing, and installing them needs root or sudo: $*" "run as root: apt-get install $*"
    say "installing the Debian packages $*"
    as_root apt-get update "${quiet[@]}" || say "apt-get update failed; trying with the package lists that are there"
    if server_runs "$major" && apt-get -s install --no-install-recommends "$@" | grep -q "^Inst postgresql-$major \["; then
        die "installing $* would upgrade postgresql-$major and restart the server that runs" "when that suits you, run: apt-get install $*"
    fi
    case " $* " in
        *" postgresql-$major "*) without_main_cluster apt_install "$@" ;;
        *) apt_install "$@" ;;
    esac || die "apt-get could not install $*" "is this machine connected to a network?"
}

# A run that was killed may have left Debian's configuration changed.
if [ -e /etc/postgresql-common/createcluster.conf.before-pg_tensile ]; then
    as_root mv /etc/postgresql-common/createcluster.conf.before-pg_tensile /etc/postgresql-common/createcluster.conf
fi
major=$(pg_major)
if [ -z "$major" ] && command -v apt-get >/dev/null; then
    as_root apt-get update "${quiet[@]}" || true
    major=$(pg_major)
fi
[ -n "$major" ] || die "no PostgreSQL is installed, and apt knows none" "is this machine connected to a network? PG_CONFIG=… names a server elsewhere"
[ "$major" -ge $minimum ] ||
    die "PostgreSQL $major is too old: pg_tensile needs $minimum or later" "install postgresql-$minimum or a later one, or name another server with PG_CONFIG=…"
packages=$(missing_packages "$major")
# shellcheck disable=SC2086
[ -z "$packages" ] || install_packages "$major" $packages
server_complete || die "PostgreSQL is not complete: $pg_config lacks the server, its headers or PL/Python" "name another server with PG_CONFIG=…"

# ---- the virtual environment ----------------------------------------------------------------------------------------

/usr/bin/python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "/usr/bin/python3 is older than 3.11" "use Debian 12 or later"

server_user=${PG_TENSILE_USER:-postgres}
stamp_name=.pg_tensile-stamp

# Of what a venv was made from: a line for each file of requirements.
stamp() {
    local file
    for file in "$@"; do
        (cat "$file"; /usr/bin/python3 --version) | sha256sum
    done
}

# Has .venv what is asked for, or more?
complete() { [ "$(head -n ${#requirements[@]} .venv/$stamp_name 2>/dev/null)" = "$(stamp "${requirements[@]}")" ]; }

# Can the server's user work in this folder? (Only root starts servers as another user.)
enterable() { [ "$(id -u)" != 0 ] || runuser -u "$server_user" -- test -r "$1" -a -x "$1"; }
from_system_python() { grep -qs '^home = /usr/bin$' "$1/pyvenv.cfg"; }

venv_folder() {
    if enterable "$clone"; then
        echo "$clone/.venv"
    else
        echo "/var/lib/pg_tensile/venv-$(echo "$clone" | sha256sum | cut -c1-12)"
    fi
}

# Lines of pip's output, as short as a log wants them.
summary_of_pip() {
    local line commas
    while IFS= read -r line; do
        if [[ $line =~ (Downloading|Using cached)\ ([^ ]+)\ \(([0-9.]+\ [MG]B)\) ]]; then
            say "${BASH_REMATCH[1]} ${BASH_REMATCH[2]##*/} (${BASH_REMATCH[3]})"
        elif [[ $line =~ ^Processing\ (.*\.whl) ]]; then
            say "Using ${BASH_REMATCH[1]##*/} ($(du -shL "${BASH_REMATCH[1]}" 2>/dev/null | cut -f1)B)"
        elif [[ $line == "Installing collected packages: "* ]]; then
            commas=${line//[!,]/}
            say "unpacking $((${#commas} + 1)) packages"
        fi
    done
}

# On a terminal, pip shows a bar for each package; in a log, there is a line for each of a megabyte or more. Its warnings
# are about indexes and folders that the machine's configuration names. Bytecode is made afterwards, by all cores.
pip_install() {
    local pip=("$1/bin/python" -m pip install --disable-pip-version-check --no-compile --use-pep517 -r "$2")
    {
        if [ -t 1 ]; then "${pip[@]}"; else "${pip[@]}" --progress-bar off | summary_of_pip; fi
    } 2> >(grep -v '^WARNING: ' >&2)
}

# Say how large a folder has become, every ten seconds in which it has grown: pip is silent while it unpacks.
watch_folder() {
    local size last=
    while sleep 10 >/dev/null 2>&1 && kill -0 $$ 2>/dev/null; do
        size=$(du -sm "$1" | cut -f1)
        [ "$size" = "${last:-$size}" ] || say "$size MB are in .venv"
        last=$size
    done
}

make_venv() {
    local folder=$1
    if [ "$folder" != "$clone/.venv" ]; then
        [ ! -d .venv ] || [ -L .venv ] || [ -e .venv/$stamp_name ] || die "user $server_user cannot read .venv" "move it away and run again"
        mkdir -p "$folder"
        [ -L .venv ] || rm -rf .venv
        ln -sfn "$folder" .venv
    elif [ -L .venv ]; then
        rm .venv
    fi
    from_system_python "$folder" || /usr/bin/python3 -m venv --clear "$folder"
    say "installing the Python packages of ${requirements[-1]} into .venv, which takes minutes, but only the first time"
    say "the largest is torch: 0.2 GB to fetch if it is built for the CPU, with CUDA several GB"
    watch_folder "$folder" &
    local watcher=$! status=0
    pip_install "$folder" "${requirements[-1]}" || status=$?
    if [ $status = 0 ]; then
        # The server's user could not write it later. As with pip, what cannot be compiled is left as it is.
        say "compiling them to bytecode"
        "$folder/bin/python" -m compileall -q -j 0 "$folder"/lib/python3*/site-packages >/dev/null 2>&1 || true
    fi
    kill $watcher 2>/dev/null || true
    [ $status = 0 ] || die "pip could not install ${requirements[-1]}" "is this machine connected to a network?"
    chmod -R go+rX "$folder"
    stamp "${requirements[@]}" >"$folder/$stamp_name"
}

if ! complete || ! from_system_python .venv || ! enterable "$(realpath .venv)"; then
    make_venv "$(venv_folder)"
fi

# ---- this clone's package, from whatever folder: for programs of .venv/bin/python, and as the command pg-tensile -------

# Of the clone only pg_tensile, because names like docs or tests are those of other packages, too. The folder comes last in
# the path, so that the child processes of a server import the server's copy, which PYTHONPATH names.
importable=$(realpath .venv)/share/pg_tensile
if [ "$(readlink "$importable/pg_tensile")" != "$clone/pg_tensile" ]; then
    mkdir -p "$importable"
    ln -sfn "$clone/pg_tensile" "$importable/pg_tensile"
fi
for packages in .venv/lib/python3*/site-packages; do
    [ "$(cat "$packages/pg_tensile.pth" 2>/dev/null)" = "$importable" ] || echo "$importable" >"$packages/pg_tensile.pth"
done

command_text() {
    printf '%s\n' '#!/bin/bash' '# Written by scripts/setup.sh.' \
        "export PYTHONPATH=$(printf '%q' "$clone")\${PYTHONPATH:+:\$PYTHONPATH}" \
        "exec $(printf '%q' "$(realpath .venv)/bin/python") -P -m pg_tensile \"\$@\""
}

if [ "$(cat .venv/bin/pg-tensile 2>/dev/null)" != "$(command_text)" ]; then
    command_text >.venv/bin/pg-tensile
    chmod 755 .venv/bin/pg-tensile
fi
