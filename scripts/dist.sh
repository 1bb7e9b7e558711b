#!/bin/bash
# Makes pg_tensile-VERSION.zip, the archive for PGXN, out of the last commit: `make dist`.
#
#     scripts/dist.sh [FOLDER]      dist, unless another folder is given
#
# A commit gives the same bytes every time, by the same versions of git and zlib: the files have the commit's date, and
# neither the caller's time zone, locale and umask nor settings of git count. .gitattributes says what stays out.
set -eu -o pipefail
folder=$(realpath -m "${1:-"$(dirname "$0")/../dist"}")
cd "$(dirname "$0")/.."
export TZ=UTC LC_ALL=C GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_ATTR_NOSYSTEM=1
git=(git -c "safe.directory=$PWD" -c core.autocrlf=false -c core.eol=lf -c core.attributesFile=/dev/null)

commit=$("${git[@]}" rev-parse --verify HEAD)
version=$("${git[@]}" show "$commit:META.json" | python3 -c 'import json, sys; print(json.load(sys.stdin)["version"])')
name=pg_tensile-$version
[ -z "$("${git[@]}" status --porcelain)" ] || echo "dist: changes that are not committed are not in the archive" >&2
mkdir -p "$folder"
partial=$(mktemp "$folder/.$name-XXXXXX")
trap 'rm -f "$partial"' EXIT
"${git[@]}" archive --format=zip -9 --prefix="$name/" "$commit" >"$partial"
chmod 644 "$partial"
mv "$partial" "$folder/$name.zip"
echo "$folder/$name.zip: revision ${commit:0:12}, $(stat -c %s "$folder/$name.zip") bytes"
