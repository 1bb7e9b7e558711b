#!/bin/bash
# pg_regress over tests/regress against a temporary server that preloads the installed extension.
#
# PostgreSQL refuses to run as root: root runs it as PG_TENSILE_USER (postgres) on a copy that this user can read.
# Results and, after a failure, regression.diffs are left in tmp_check/.
set -eu -o pipefail
umask 022
cd "$(dirname "$0")/.."
pg_config=${PG_CONFIG:-pg_config}
pg_regress=$(dirname "$("$pg_config" --pgxs)")/../test/regress/pg_regress
tests=$(cd tests/regress/sql && ls -- *.sql | sed 's/\.sql$//')

folder=$(mktemp -d "${TMPDIR:-/tmp}/pgt-regress-XXXXXX")
trap 'rm -rf "$folder"' EXIT
cp -R tests/regress/. "$folder"
cat >"$folder/temp.conf" <<'CONF'
shared_preload_libraries = 'pg_tensile'
pg_tensile.database = 'contrib_regression'
max_worker_processes = 24
pg_tensile.auto_calibrate = off
CONF
as_server_user=()
if [ "$(id -u)" = 0 ]; then
    as_server_user=(runuser -u "${PG_TENSILE_USER:-postgres}" --)
    chown -R "${PG_TENSILE_USER:-postgres}" "$folder"
fi

status=0
# Without PG* variables of the caller, from a folder the server's user can enter.
# shellcheck disable=SC2086,SC2046
(cd "$folder" && unset $(compgen -e PG) && "${as_server_user[@]}" "$pg_regress" --inputdir=. --outputdir=out --temp-instance=instance \
    --temp-config=temp.conf --bindir="$("$pg_config" --bindir)" --no-locale --encoding=UTF8 --dbname=contrib_regression $tests) || status=$?
rm -rf tmp_check
mkdir -p tmp_check
cp -R "$folder/out/." tmp_check
[ $status = 0 ] || cat tmp_check/regression.diffs 2>/dev/null || tail -n 20 tmp_check/log/*.log
exit $status
