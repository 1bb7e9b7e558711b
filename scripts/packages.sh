#!/bin/bash
# Builds the Debian packages and tests them, each in a clean folder of the Debian that has a major version: make packages
#
#     scripts/packages.sh 15 17
#
# scripts/packages/build.sh builds the working tree with dpkg-buildpackage and runs lintian, in a folder with compilers;
# scripts/packages/check.sh installs, uses and removes the packages in one that has neither compilers nor PostgreSQL.
# build/packages/RELEASE gets the packages, their .buildinfo, and a summary with sizes and times.
#
# Python packages are fetched once, for the CPU, into the cache's folder wheels (PG_TENSILE_WHEELS names another one)
# with this machine's /usr/bin/python3, which is lent to a Debian whose own is another version. With
# PG_TENSILE_ENVIRONMENT=.venv that environment is lent as well, which saves minutes: pg-tensile-setup does not run then.
#
# scripts/debian_folders.sh says what this needs: Debian, and root or sudo.
set -Eeuo pipefail
cd "$(dirname "$0")/.."
clone=$(pwd -P)
. scripts/debian_folders.sh
. scripts/packages/wheels.sh
RELEASED=7531e0c # 0.1.0, which trains on PostgreSQL 15 only

# What git has or would have, so nothing that was compiled here
export_tree() {
    git ls-files -z --cached --others --exclude-standard | tar -c --null --ignore-failed-read -T - 2>/dev/null |
        tar -x --no-same-owner -C "$1"
}

build() {
    mkdir -p "$root/build/pg-tensile" "$root/out"
    export_tree "$root/build/pg-tensile"
    if [ "$major" = 15 ]; then
        mkdir "$root/build/released"
        git archive "$RELEASED" | tar -x -C "$root/build/released"
    fi
    mount --bind "$output" "$root/out"
    in_root bash "/build/pg-tensile/scripts/packages/build.sh" "$major"
}

check() {
    mkdir -p "$root/packages" "$root/wheels"
    cp "$output"/*.deb "$root/packages"
    [ ! -e "$output/released.tar" ] || mv "$output/released.tar" "$root/packages"
    cp scripts/packages/check.sh "$root/packages"
    if [ -n "$environment" ]; then
        mkdir "$root/opt/environment" "$scratch/environment" "$scratch/environment-work"
        mount -t overlay overlay "$root/opt/environment" \
            -o "lowerdir=$environment,upperdir=$scratch/environment,workdir=$scratch/environment-work"
        ln -sfn "$python" "$root/opt/environment/bin/python3"
    else
        mount --bind -o ro "$wheels" "$root/wheels"
    fi
    lend_python "$python"
    in_root bash /packages/check.sh "$major" "$python"
}

# Of the build and the check, seconds; of the files, sizes
summarize() {
    {
        echo "PostgreSQL $major on Debian $(release "$major"), pg_tensile $(git describe --always --dirty)"
        echo "built in $1 s, installed, used and removed in $2 s"
        cat "$output/lintian.txt"
        (cd "$output" && stat --format '%s bytes  %n' -- *.deb)
    } | tee "$output/summary.txt"
}

[ $# -ge 1 ] || die "a major version of PostgreSQL is needed" "$0 15 17"
become_root "$@"
export clone RELEASED
export -f export_tree build check
environment=${PG_TENSILE_ENVIRONMENT:+$(realpath "$PG_TENSILE_ENVIRONMENT")}
[ -n "$environment" ] || fetch_wheels
export environment
for major in "$@"; do
    output=$clone/build/packages/$(release "$major")
    export major output
    rm -rf "$output"
    mkdir -p "$output"
    # clang and LLVM come with the headers of the server, as on Debian's own builders
    keep_folder "packages-$(release "$major")-$major" "$major" \
        "build-essential,debhelper,dh-python,lintian,python3,postgresql-server-dev-all,postgresql-server-dev-$major"
    began=$SECONDS
    in_folder build
    built=$SECONDS
    keep_folder "clean-$(release "$major")-$major" "$major" ca-certificates
    in_folder check
    summarize $((built - began)) $((SECONDS - built))
done
