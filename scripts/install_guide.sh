#!/bin/bash
# Runs the commands of docs/install.md in a clean Debian, from top to bottom: one way to install, the prediction, the removal.
#
#     scripts/install_guide.sh packages 17
#     scripts/install_guide.sh source 15
#
# The packages are those of build/packages (make packages), the source is that of make dist. PyTorch and the other wheels
# come from the folder that scripts/packages.sh fetches them into, and so are built for this machine's Python, which is lent
# to a Debian that has another one. build/install gets the output and the time of each command.
set -Eeuo pipefail
cd "$(dirname "$0")/.."
clone=$(pwd -P)
. scripts/debian_folders.sh

guide() {
    mkdir -p "$root/out" "$root/wheels" "$root/root/release"
    mount --bind "$output" "$root/out"
    mount --bind -o ro "$wheels" "$root/wheels"
    cp "${files[@]}" "$root/root/release"
    lend_python "$python"
    in_root bash -c 'cd /root/release && exec bash /out/script' >"$output/log" 2>&1
}

[ $# = 2 ] || die "a way and a major version of PostgreSQL are needed" "$0 packages 17"
become_root "$@"
way=$1 major=$2
fetch_wheels
output=$clone/build/install/$(release "$major")-$way
rm -rf "$output"
mkdir -p "$output"
python3 scripts/install_guide.py "$way" "$major" "$python" >"$output/script"
keep_folder "clean-$(release "$major")-$major" "$major" ca-certificates
in_folder guide
