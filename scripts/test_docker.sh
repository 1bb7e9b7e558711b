#!/bin/bash
# Builds the images of docker/ and tests them: `make test-docker`. docker/tests runs against the server's image; that of
# the extension alone is unpacked into a folder with its Debian (scripts/debian_folder.sh), and docker/volume runs there;
# where this is no Debian, it is built only. `scripts/test_docker.sh extension` or `server` is about one of them.
#
# The engine: Docker, if its daemon answers; else Podman, if it can run a container as it is; else, on Debian as root or
# with sudo, Podman from Debian's packages with everything of its own (storage, configuration, base image) in a scratch
# folder, which is removed at the end. Where no registry gives the base image, mmdebstrap makes one out of the packages
# that this Debian installs from. Where there is no engine, this fails and says so.
#
# BASE, PG_MAJOR, TORCH and TORCH_INDEX in the environment go into the build; without TORCH it is the version in .venv.
# With Podman pip's settings on this machine hold for the build, and without TORCH_INDEX pip's own index: Docker cannot
# mount anything into a build.
# Needs about 5 GB of disk. Docker and Podman keep the images and their layers, a Podman of our own keeps nothing.
set -Eeuo pipefail
cd "$(dirname "$0")/.."
image=pg_tensile:test
extension=pg_tensile-extension:test
# The default of the build argument $1 in docker/$2
default() { sed -n "s/^ARG $1=//p" "docker/$2"; }
server_base=${BASE:-$(default BASE Dockerfile)}
python=.venv/bin/python
. scripts/debian_sources.sh
export DISABLE_HC_SYSTEMD=true # Podman's health checks need timers of systemd; the tests run them by hand

say() { echo "test-docker: $*"; }
die() {
    echo "test-docker: $1" >&2
    echo "hint: $2" >&2
    exit 1
}

# Runs a command whose output is of interest only if it fails; $1 says what it does.
quietly() {
    local what=$1
    shift
    say "$what"
    "$@" >"$scratch/log" 2>&1 && return
    tail -n 40 "$scratch/log" >&2
    die "$what failed" "Its last lines are above."
}

# ---- the engine -----------------------------------------------------------------------------------------------------

docker_answers() { command -v docker >/dev/null && timeout 20 docker info >/dev/null 2>&1; }

podman_runs() {
    command -v podman >/dev/null && timeout 60 podman pull --quiet "$server_base" >/dev/null 2>&1 &&
        timeout 60 podman run --rm "$server_base" true >/dev/null 2>&1
}

# Prints docker, podman or scratch (a Podman of our own).
choose_engine() {
    if docker_answers; then
        echo docker
    elif podman_runs; then
        echo podman
    elif [ -e /etc/debian_version ] && command -v apt-get >/dev/null; then
        echo scratch
    else
        die "neither Docker nor Podman runs here, and this is not Debian" "Start Docker, or install Podman."
    fi
}

become_root() {
    [ "$(id -u)" != 0 ] || return 0
    command -v sudo >/dev/null ||
        die "neither Docker nor Podman runs here, and a Podman of our own needs root" "Start Docker, or run as root."
    exec sudo -E "$PWD/scripts/test_docker.sh" "$@"
}

install_packages() {
    local missing=() command
    for command in mmdebstrap podman runc; do
        command -v "$command" >/dev/null || missing+=("$command")
    done
    [ ${#missing[@]} != 0 ] || return 0
    quietly "apt-get update" apt-get update -q
    quietly "installing the Debian packages ${missing[*]}" \
        env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
}

# runc and no limits of Podman's own, because containers may be nested and short of privileges here; the host's network,
# because that needs neither a bridge nor a firewall.
configure_podman() {
    export CONTAINERS_STORAGE_CONF=$scratch/storage.conf CONTAINERS_CONF=$scratch/containers.conf TMPDIR=$scratch/tmp
    mkdir "$TMPDIR"
    cat >"$CONTAINERS_CONF" <<CONF
[containers]
netns = "host"
log_driver = "k8s-file"
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "$scratch/engine"
CONF
    store_with overlay
    podman info >/dev/null 2>&1 || store_with vfs
    podman info >"$scratch/log" 2>&1 || die "Podman does not work here: $(tail -n 1 "$scratch/log")" "Start Docker."
}

store_with() {
    cat >"$CONTAINERS_STORAGE_CONF" <<CONF
[storage]
driver = "$1"
graphroot = "$scratch/storage"
runroot = "$scratch/run"
CONF
}

mounted() { awk -v folder="$scratch/" 'index($2, folder) == 1 { print $2 }' /proc/self/mounts | sort -r; }

clean_up() {
    set +e
    [ ! -e "$scratch/containers.conf" ] || podman rm --all --force --volumes --time 0 >/dev/null 2>&1
    mounted | xargs -r umount
    if [ -n "$(mounted)" ]; then
        say "$scratch is left: something is mounted below it"
    else
        rm -rf "$scratch"
    fi
}

# ---- the image ------------------------------------------------------------------------------------------------------

get_base() {
    timeout 60 "$engine" pull --quiet "$base" >/dev/null 2>&1 || make_base
}

# Debian's release, from the mirrors that this machine installs from. Packages start no services in it: there is no init.
make_base() {
    local codename options
    if [[ ! $base =~ ^debian:([a-z]+)(-slim)?$ ]] || [ "$(id -u)" != 0 ] || ! command -v mmdebstrap >/dev/null; then
        die "$base cannot be pulled" "Reach a registry; or on Debian install mmdebstrap, run as root, and name a release, as in BASE=debian:trixie-slim."
    fi
    codename=${BASH_REMATCH[1]}
    mapfile -t options < <(debian_options)
    debian_sources "$codename" >"$scratch/sources"
    quietly "making $base out of Debian's packages" \
        mmdebstrap --variant=minbase "${options[@]}" "$codename" "$scratch/base.tar" "$scratch/sources"
    if [ "$engine" = docker ]; then base=pg_tensile-$base; else base=localhost/$base; fi
    quietly "importing it" "$engine" import "$scratch/base.tar" "$base"
    base=${base#localhost/} # FROM finds it by its short name
    rm "$scratch/base.tar"
}

# Builds the image $1 of docker/$2; the other arguments are the engine's.
build() {
    local tag=$1 file=$2 options
    options=(--file "docker/$file" --tag "$tag" --build-arg "BASE=$base" "${@:3}")
    if [ "$engine" = podman ]; then options+=(--format docker --network host --pull-never); fi
    [ "$choice" != scratch ] || options+=(--isolation chroot --layers=false) # layers serve a next build only
    quietly "building $tag with $engine" "$engine" build "${options[@]}" .
}

build_server() {
    local options=() name mount
    TORCH=${TORCH:-torch==$("$python" -c 'from importlib.metadata import version; print(version("torch"))')}
    [ "$engine" != podman ] || TORCH_INDEX=${TORCH_INDEX:-}
    for name in PG_MAJOR TORCH TORCH_INDEX; do
        [ -z "${!name+set}" ] || options+=(--build-arg "$name=${!name}")
    done
    if [ "$engine" = podman ]; then
        "$python" docker/tests/host_pip.py "$scratch/pip" >"$scratch/mounts"
        while read -r mount; do options+=(--volume "$mount:ro"); done <"$scratch/mounts"
    fi
    say "with $TORCH"
    build "$image" Dockerfile "${options[@]}"
}

test_server() {
    base=$server_base
    get_base
    build_server
    PG_TENSILE_ENGINE=$engine PG_TENSILE_IMAGE=$image PG_TENSILE_HOST_NETWORK=$([ "$choice" != scratch ] || echo 1) \
        "$python" -m pytest -p no:cacheprovider --confcutdir docker/tests docker/tests
}

# An image without a command needs the name of one to become a container, which never runs.
test_extension() {
    local container
    base=$(default BASE extension.Dockerfile)
    get_base
    build "$extension" extension.Dockerfile
    [ -e /etc/debian_version ] || return 0
    container=$("$engine" create "$extension" none)
    "$engine" export "$container" >"$scratch/extension.tar"
    "$engine" rm "$container" >/dev/null
    # Only what is the image's: engines add /dev and the like to a container.
    scripts/debian_folder.sh "$(default PG_MAJOR extension.Dockerfile)" bash -ec '
        mkdir -p /extensions/pg_tensile
        tar -x --no-same-owner -C /extensions/pg_tensile lib share licenses
        make -s uninstall
        exec .venv/bin/python -m pytest -p no:cacheprovider --confcutdir docker/volume docker/volume
    ' <"$scratch/extension.tar"
}

choice=$(choose_engine)
[ "$choice" != scratch ] || become_root "$@"
scratch=$(mktemp -d /var/tmp/pgt-docker-XXXXXX)
trap clean_up EXIT
engine=$choice
if [ "$choice" = scratch ]; then
    engine=podman
    install_packages
    configure_podman
fi
[ $# != 0 ] || set -- server extension
for one in "$@"; do
    case $one in
        server) test_server ;;
        extension) test_extension ;;
        *) die "there is no image \"$one\"" "Name server or extension." ;;
    esac
done
