#!/bin/bash
# The entry point of the image: makes the data directory at the first start, then becomes the server.
#
#     docker-entrypoint.sh postgres [-c name=value …]    any other command is run as it is, as user postgres too
#     docker-entrypoint.sh healthcheck                   status 0: the server takes connections, the extension answers
#
# For users of the official postgres image: POSTGRES_PASSWORD, POSTGRES_USER, POSTGRES_DB and POSTGRES_INITDB_ARGS, each
# also as NAME_FILE; POSTGRES_HOST_AUTH_METHOD; scripts in /docker-entrypoint-initdb.d. Two things are stricter. Over
# TCP nobody is let in without a password, not even from the container itself. And a first start that was killed or
# has failed, in a script of the user's too, is begun anew by the next start: until it is done, a marker is in the data
# directory, which was empty before.
#
# Phases:
#   1. as whoever starts the container: variables from files, and as root folders for postgres
#   2. as postgres (or the user of --user), below tini: lock the data directory, first start if needed, exec
# tini is process 1, because process 1 inherits every orphan: the postmaster would take a killed one, left by a child of
# pg_tensile, for a crashed session, and end all sessions.
set -Eeuo pipefail

unfinished=$PGDATA/.pg_tensile-unfinished

say() { echo "pg_tensile: $*" >&2; }
die() {
    say "$1"
    echo "hint: $2" >&2
    exit 1
}

# Is this command the server, and not a question about it?
serves() {
    local argument
    [ "$1" = postgres ] || return 1
    for argument in "${@:2}"; do
        case $argument in
            '-?' | --help | --describe-config | -V | --version) return 1 ;;
        esac
    done
}

# ---- variables ------------------------------------------------------------------------------------------------------

# Exports the variable $1: as it is, from the file that $1_FILE names, or else as $2.
file_env() {
    local name=$1 file_name=$1_FILE
    local file=${!file_name:-}
    if [ -z "$file" ]; then
        export "$name=${!name:-${2:-}}"
        return
    fi
    [ -z "${!name:-}" ] || die "both $name and $file_name are set" "Leave one of them out."
    [ -r "$file" ] || die "$file_name names $file, which cannot be read" "Mount that file, readable for user $(id -u)."
    export "$name=$(<"$file")"
    unset "$file_name"
}

read_variables() {
    file_env POSTGRES_PASSWORD
    file_env POSTGRES_USER postgres
    file_env POSTGRES_DB "$POSTGRES_USER"
    file_env POSTGRES_INITDB_ARGS
    export POSTGRES_HOST_AUTH_METHOD=${POSTGRES_HOST_AUTH_METHOD:-scram-sha-256}
}

# Of those that only the first start needs
check_variables() {
    [ -z "${POSTGRES_INITDB_WALDIR:-}" ] ||
        die "POSTGRES_INITDB_WALDIR is not understood" "Write POSTGRES_INITDB_ARGS=--waldir=FOLDER, an empty folder."
    [[ $POSTGRES_PASSWORD != *$'\n'* ]] || die "POSTGRES_PASSWORD has several lines" "Choose a password of one line."
    if [ "$POSTGRES_HOST_AUTH_METHOD" = trust ]; then
        say "warning: POSTGRES_HOST_AUTH_METHOD=trust lets everybody who reaches the port in, as any role"
    elif [ -z "$POSTGRES_PASSWORD" ]; then
        die "POSTGRES_PASSWORD is not set: a new database needs a password for role \"$POSTGRES_USER\"" \
            "Set POSTGRES_PASSWORD, or POSTGRES_PASSWORD_FILE to the name of a file that has it."
    fi
}

# ---- phase 1: whoever starts the container --------------------------------------------------------------------------

own_folders() {
    install -d -o postgres -g postgres -m 3777 /var/run/postgresql
    [ -d "$PGDATA" ] || install -d -m 0700 "$PGDATA"
    # A data directory that was used with --user before changes hands.
    find "$PGDATA" -ignore_readdir_race ! -user postgres -exec chown postgres:postgres {} +
}

hand_over() {
    local as_postgres=()
    read_variables # here, because a secret may be readable for root only
    if [ "$(id -u)" = 0 ]; then
        if serves "$@"; then own_folders; fi
        as_postgres=(setpriv --reuid=postgres --regid=postgres --init-groups)
    fi
    # Python asks for the names of user and home, and a user given with --user may have none.
    export HOME=/var/lib/postgresql USER=postgres LOGNAME=postgres
    exec "${as_postgres[@]}" tini -s -- "$0" begin "$@"
}

# ---- phase 2: the server's user -------------------------------------------------------------------------------------

begin() {
    if serves "$@"; then
        take_folder
        if [ ! -s "$PGDATA/PG_VERSION" ] || [ -e "$unfinished" ]; then first_start "${@:2}"; fi
        unset POSTGRES_PASSWORD PGPASSWORD # not for the server's processes
    fi
    exec "$@"
}

# Two servers on one data directory destroy it, and PostgreSQL does not see processes of other containers. The lock is
# held as long as any process of the server lives.
take_folder() {
    [ -d "$PGDATA" ] || install -d -m 0700 "$PGDATA" ||
        die "user $(id -u) cannot make the data directory $PGDATA" "Mount a folder or volume that this user may write."
    [ -O "$PGDATA" ] ||
        die "the data directory $PGDATA belongs to user $(stat -c %u "$PGDATA"), and this container is user $(id -u)" \
            "Start it without --user (it goes on as postgres by itself), or give the folder to user $(id -u)."
    exec 9<"$PGDATA"
    flock --wait 5 9 || die "another container uses the data directory $PGDATA" "Stop that one first."
}

first_start() {
    check_variables
    clear_folder
    trap 'say "the first start has not come to its end; the next start begins anew"' EXIT
    trap 'exit 130' INT TERM
    make_cluster
    write_settings
    export PGPASSWORD=$POSTGRES_PASSWORD # for a pg_hba.conf that asks for one on the socket too
    pg_ctl start --wait --silent -o "$(printf '%q ' "$@" -c listen_addresses= \
        -c unix_socket_directories=/var/run/postgresql -p "${PGPORT:-5432}")"
    make_database
    run_scripts
    pg_ctl stop --wait --silent --mode=fast
    sync --file-system "$PGDATA"
    rm -r "$unfinished"
    sync --file-system "$PGDATA"
    trap - EXIT INT TERM
    say "database \"$POSTGRES_DB\" is made; the server starts"
}

# What lies beside the marker is of a first start that did not come to its end.
clear_folder() {
    if [ -e "$unfinished" ]; then
        say "an earlier first start has not come to its end: beginning anew"
        find "$PGDATA" -mindepth 1 -maxdepth 1 ! -name "${unfinished##*/}" -exec rm -rf {} +
        find "$unfinished" -mindepth 1 -delete
    elif [ -n "$(ls -A "$PGDATA")" ]; then
        die "$PGDATA is not empty, and no data directory of PostgreSQL" \
            "Mount an empty folder or volume, or set PGDATA to a folder inside this one."
    else
        mkdir "$unfinished"
    fi
}

# initdb wants an empty folder, and PGDATA may be a mount point: so it works beside the marker, and the result moves up.
make_cluster() {
    local options
    eval "options=($POSTGRES_INITDB_ARGS)" # quoted as in a shell, as the official image has it
    [ -z "$POSTGRES_PASSWORD" ] || options+=(--pwfile=/dev/fd/3)
    with_name initdb --pgdata="$unfinished/data" --username="$POSTGRES_USER" --auth-local=trust \
        --auth-host="$POSTGRES_HOST_AUTH_METHOD" --no-sync --no-instructions "${options[@]}" \
        3< <(printf '%s\n' "$POSTGRES_PASSWORD") # no password on a command line
    chmod --reference="$unfinished/data" "$PGDATA"
    mv "$unfinished"/data/* "$PGDATA"
}

# Runs a command that insists on a name for its user.
with_name() {
    if getent passwd "$(id -u)" >/dev/null; then
        "$@"
        return
    fi
    printf 'postgres:x:%s:%s::%s:/bin/false\n' "$(id -u)" "$(id -g)" "$HOME" >"$unfinished/passwd"
    printf 'postgres:x:%s:\n' "$(id -g)" >"$unfinished/group"
    LD_PRELOAD=libnss_wrapper.so NSS_WRAPPER_PASSWD=$unfinished/passwd NSS_WRAPPER_GROUP=$unfinished/group "$@"
}

write_settings() {
    local database
    database=$(sed "s/['\\\\]/&&/g" <<<"$POSTGRES_DB") # in quotes
    cat >>"$PGDATA/postgresql.conf" <<SETTINGS

# Written at the first start of the container
listen_addresses = '*'
shared_preload_libraries = 'pg_tensile'
pg_tensile.database = '$database'
max_worker_processes = 24
SETTINGS
    printf '\nhost all all all %s\n' "$POSTGRES_HOST_AUTH_METHOD" >>"$PGDATA/pg_hba.conf"
}

make_database() {
    docker_process_sql --dbname postgres --set database="$POSTGRES_DB" <<'SQL'
SELECT format('CREATE DATABASE %I', :'database')
WHERE NOT EXISTS (SELECT FROM pg_database WHERE datname = :'database') \gexec
SQL
    docker_process_sql --quiet --command 'CREATE EXTENSION pg_tensile CASCADE'
}

# psql as the superuser; scripts that are sourced know it by this name.
docker_process_sql() {
    psql --no-psqlrc --no-password --set ON_ERROR_STOP=1 --username "$POSTGRES_USER" --dbname "$POSTGRES_DB" "$@"
}

run_scripts() {
    local script
    for script in /docker-entrypoint-initdb.d/*; do
        [ -e "$script" ] || continue # the folder is empty
        say "$script"
        case $script in
            *.sh) run_shell_script "$script" ;;
            *.sql) docker_process_sql --file "$script" ;;
            *.sql.gz) gzip -dc "$script" | docker_process_sql ;;
            *.sql.xz) xz -dc "$script" | docker_process_sql ;;
            *.sql.zst) zstd -dc "$script" | docker_process_sql ;;
            *) say "ignored: no .sh, .sql, .sql.gz, .sql.xz or .sql.zst" ;;
        esac
    done
}

# Executable ones have a process of their own, the others are part of this one.
run_shell_script() {
    if [ -x "$1" ]; then
        "$1"
    else
        set +u
        # shellcheck source=/dev/null
        . "$1"
        set -u
    fi
}

# ---- health ---------------------------------------------------------------------------------------------------------

# Asked through the socket of the server that runs, whatever its port. (The status of an unhealthy container is 1.)
healthy() {
    local running
    read_variables
    [ ! -e "$unfinished" ] || die "the first start has not come to its end" "Wait, or look into the container's log."
    [ -r "$PGDATA/postmaster.pid" ] || die "the server does not run" "Look into the container's log."
    mapfile -t running <"$PGDATA/postmaster.pid"
    export PGPORT=${running[3]:-} PGHOST=${running[4]:-} PGPASSWORD=$POSTGRES_PASSWORD
    # The view fails unless the library was preloaded.
    docker_process_sql -At --command 'SELECT tensile_worker._version(), count(*) FROM tensile.progress' || exit 1
}

case ${1:-} in
    healthcheck) healthy ;;
    begin) begin "${@:2}" ;;
    '' | -*) hand_over postgres "$@" ;;
    *) hand_over "$@" ;;
esac
