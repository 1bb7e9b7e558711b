#!/bin/bash
# Runs the commands of docs/install.md in a clean Debian, from top to bottom: one way to install, a prediction, the removal.
#
#     scripts/install_guide.sh packages 17
#     scripts/install_guide.sh source 15
#
# The packages are those of build/packages (scripts/packages.sh makes them), the source is that of make dist. PyTorch and
# the other wheels come from a folder (scripts/packages/wheels.sh), and so are for this machine's Python, which is lent to a
# Debian that has another one; nothing else of this machine is used. build/install/RELEASE-WAY gets the script, its output,
# and result.json (scripts/install_guide.py).
set -Eeuo pipefail
cd "$(dirname "$0")/.."
clone=$(pwd -P)
. scripts/debian_folders.sh
. scripts/packages/wheels.sh

guide() {
    local left
    mkdir -p "$root/out" "$root/wheels" "$root/root/release"
    mount --bind "$output" "$root/out"
    mount --bind -o ro "$wheels" "$root/wheels"
    cp "$output"/release/* "$root/root/release"
    lend_python "$python"
    in_root DEBIAN_FRONTEND=noninteractive bash -c 'cd /root/release && exec bash /out/script' >"$output/log" 2>&1 || {
        tail -n 30 "$output/log" >&2
        die "a command of docs/install.md failed" "Its last lines are above; build/install has all."
    }
    left=$(in_root find / -xdev \( -name '*pg[_-]tensile*' -o -name pyworker \) -not -name .pg_tensile-recipe \
        -not -path '/root/*' -not -path '/out/*')
    [ -z "$left" ] || die "the removal leaves $left" "docs/install.md says how to remove it."
}

[ $# = 2 ] || die "a way and a major version of PostgreSQL are needed" "$0 packages 17"
become_root "$@"
way=$1 major=$2
fetch_wheels
output=$clone/build/install/$(release "$major")-$way
rm -rf "$output"
mkdir -p "$output/release"
case $way in
    packages)
        cp "build/packages/$(release "$major")"/*.deb "$output/release" ||
            die "there are no packages" "scripts/packages.sh $major makes them."
        ;;
    source) scripts/dist.sh "$output/release" >/dev/null ;;
    *) die "there is no way $way" "Give packages or source." ;;
esac
python3 scripts/install_guide.py script "$way" "$major" "$python" >"$output/script"
keep_folder "clean-$(release "$major")-$major" "$major" ca-certificates
export output
export -f guide die
in_folder guide
python3 scripts/install_guide.py result "$output" "$wheels" >"$output/result.json"
cat "$output/result.json"
