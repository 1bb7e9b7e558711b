#!/bin/bash
# In a clean folder of scripts/packages.sh: installs the packages in /packages, and removes them again.
#
# check.sh MAJOR PYTHON; the environment is made from /wheels, or is /opt/environment. It trains and predicts, with a
# release as well where a source installation of it is in /packages, over which the package is installed.
set -Eeuo pipefail
major=$1
python=$2
common=$(echo /packages/pg-tensile-common_*.deb)
server=$(echo "/packages/postgresql-$major-pg-tensile_"*.deb)
configuration=/etc/postgresql/$major/main/conf.d/pg_tensile.conf
data=/var/lib/postgresql/$major/main
export DEBIAN_FRONTEND=noninteractive PGOPTIONS="-c client_min_messages=warning"

say() { echo "check: $*"; }
fail() {
    echo "check: $*" >&2
    tail -n 30 /var/log/postgresql/*.log >&2 || true
    exit 1
}
apt_get() { apt-get -y -q --no-install-recommends "$@" >/tmp/apt.log 2>&1; }
install() { apt_get install "$@" || fail "apt-get could not install $*: $(tail -n 20 /tmp/apt.log)"; }
sql() { runuser -u postgres -- psql -X -q -A -t -v ON_ERROR_STOP=1 -d postgres -c "$1"; }
restart() { pg_ctlcluster "$major" main restart || fail "the cluster does not start"; }
expect() { [ "$1" = "$2" ] || fail "$3: $1, not $2"; }
written() { grep -q -- "$1" /tmp/apt.log || fail "the package does not say '$1': $(tail -n 20 /tmp/apt.log)"; }

train() {
    job=$(sql "SELECT train_model('line', 'SELECT x, 2 * x AS y FROM generate_series(1, 100) x', 'y', epochs => 5)")
    expect "$(sql "SELECT wait_for_job($job, '5 min')")" finished "training ended"
}

preload() {
    mkdir -p "${configuration%/*}"
    cat >"$configuration" <<CONF
shared_preload_libraries = 'pg_tensile'
pg_tensile.database = 'postgres'
max_worker_processes = 24
pg_tensile.auto_calibrate = off
CONF
    restart
}

refused() {
    if "$@" >/tmp/apt.log 2>&1; then fail "not refused: $*"; fi
    written "$configuration, line 1"
    [ -e "/usr/lib/postgresql/$major/lib/pg_tensile.so" ] || fail "the library is gone"
}

say "$(sed -n 's/^PRETTY_NAME="\(.*\)"/\1/p' /etc/os-release): installing the packages"
apt_get update || fail "apt-get update: $(tail -n 5 /tmp/apt.log)"
install "$common" "$server"
if command -v gcc cc make; then fail "a compiler has come with the packages"; fi
written "run pg-tensile-setup"
written "shared_preload_libraries = 'pg_tensile'"
[ -z "$(find / -xdev -path '*pg_tensile/python/*' -perm -o+w)" ] || fail "anyone may write the packages' files"
if pg-tensile top >/tmp/out 2>&1; then fail "pg-tensile runs without an environment"; fi
grep -q 'hint: Run pg-tensile-setup' /tmp/out || fail "pg-tensile says: $(cat /tmp/out)"

make_environment() {
    if pg-tensile-setup --check >/tmp/out 2>&1; then fail "an environment is there"; fi
    pg-tensile-setup --find-links /wheels --python "$python"
    pg-tensile-setup --check
    pg-tensile-setup --find-links /wheels --python "$python" | grep 'up to date' || fail "it is made a second time"
}
if [ -d /opt/environment ]; then
    ln -s /opt/environment /var/lib/pg-tensile/venv
else
    say "making the environment"
    make_environment
fi

say "training and predicting"
[ -e "/etc/postgresql/$major/main" ] || pg_createcluster "$major" main
preload
sql "CREATE EXTENSION pg_tensile CASCADE; SELECT FROM register_model('line', '{\"type\": \"linear\"}')"
train
expect "$(sql "SELECT round(predict('line', ARRAY[50])::numeric, -1)")" 100 "the prediction"
runuser -u postgres -- pg-tensile top --once -d postgres >/tmp/out || fail "pg-tensile top"
runuser -u postgres -- pg-tensile export line -d postgres -o /tmp/line.model >/tmp/out || fail "pg-tensile export"
[ -s /tmp/line.model ] || fail "pg-tensile export has written nothing"
sql "DROP EXTENSION pg_tensile CASCADE"

say "removing the package: refused while the cluster preloads the library"
refused apt-get -y -q remove "postgresql-$major-pg-tensile"
refused dpkg --purge "postgresql-$major-pg-tensile"
sed -i 's/^shared/#shared/' "$configuration"
restart
apt_get remove "postgresql-$major-pg-tensile" || fail "it cannot be removed: $(tail -n 20 /tmp/apt.log)"
[ -x /var/lib/pg-tensile/venv/bin/python ] || fail "the environment is gone"

if [ -e /packages/released.tar ]; then
    say "upgrading a source installation of 0.1.0"
    tar -x --keep-directory-symlink -C / -f /packages/released.tar
    preload
    sql "CREATE EXTENSION pg_tensile CASCADE"
    sql "SELECT FROM register_model('line', '{\"type\": \"mlp\", \"hidden\": [8]}')"
    expect "$(sql "SELECT extversion FROM pg_extension WHERE extname = 'pg_tensile'")" 0.1.0 "the version"
    train
    before=$(sql "SELECT predict('line', ARRAY[50])")
    pg_ctlcluster "$major" main stop
    rmdir "$data/pg_tensile" # docs/operations.md says so
    install "$server"
    restart
    sql "ALTER EXTENSION pg_tensile UPDATE"
    expect "$(sql "SELECT predict('line', ARRAY[50])")" "$before" "the prediction after the upgrade"
    train
    say "installing it again"
    apt_get install --reinstall "$server" || fail "it cannot be installed again: $(tail -n 20 /tmp/apt.log)"
    restart
    expect "$(sql "SELECT predict('line', ARRAY[50]) IS NOT NULL")" t "a prediction"
    sql "DROP EXTENSION pg_tensile CASCADE"
fi

say "purging everything"
rm "$configuration"
restart
apt_get purge "postgresql-$major-pg-tensile" pg-tensile-common || fail "it cannot be purged: $(tail -n 20 /tmp/apt.log)"
left=$(find / -xdev \( -name '*pg[_-]tensile*' -o -name pyworker \) -not -path '/packages/*' -not -path '/.pg_tensile-recipe' -not -path "$data/pg_tensile*")
[ -z "$left" ] || fail "left after the purge: $left"
restart
say "everything works and is gone"
