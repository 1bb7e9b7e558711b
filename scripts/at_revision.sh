#!/bin/bash
# Runs a command in a clone of an earlier revision, with that revision's extension installed for this command alone:
#
#     scripts/at_revision.sh HEAD~1 .venv/bin/python -m pytest tests/server/test_demo.py
#
# What is installed and written goes into layers over PostgreSQL's folders and .venv, which are mounted in a namespace of
# its own and removed at the end. Needs root or sudo.
set -Eeuo pipefail
cd "$(dirname "$0")/.."

[ $# -ge 2 ] || { echo "usage: $0 REVISION COMMAND …" >&2; exit 2; }
if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || { echo "$0: this needs root or sudo" >&2; exit 2; }
    exec sudo -E "$0" "$@"
fi
revision=$(git rev-parse --verify --quiet "$1^{commit}") || { echo "$0: no revision $1 is here" >&2; exit 2; }
shift
scratch=$(mktemp -d /var/tmp/pgt-revision-XXXXXX)
trap 'rm -rf --one-file-system "$scratch"' EXIT
chmod 755 "$scratch"
git clone --quiet --shared . "$scratch/clone"
git -C "$scratch/clone" checkout --quiet --detach "$revision"
# the emulated accelerator is compiled again only if its sources differ
mkdir "$scratch/clone/build"
find build -maxdepth 1 -name 'emulated-*' -exec cp -a {} "$scratch/clone/build" ';' 2>/dev/null || true
ln -s "$(realpath .venv)" "$scratch/clone/.venv"

enter() {
    local number=0 folder layers
    for folder in "$(realpath .venv)" "$(${PG_CONFIG:-pg_config} --pkglibdir)" "$(${PG_CONFIG:-pg_config} --sharedir)"; do
        number=$((number + 1))
        layers=$scratch/layers-$number
        mkdir -p "$layers/changes" "$layers/work"
        mount -t overlay -o "lowerdir=$folder,upperdir=$layers/changes,workdir=$layers/work" overlay "$folder"
    done
    cd "$scratch/clone"
    make --no-print-directory -s deploy >&2
    "$@"
}
export scratch
export -f enter
status=0
unshare --mount --propagation private bash -Eeuo pipefail -c 'enter "$@"' bash "$@" || status=$?
exit $status
