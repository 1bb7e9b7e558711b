#!/bin/bash
# Everything that reads the code without running it; stops at the first complaint.
set -eu
cd "$(dirname "$0")/.."
python=.venv/bin/python

$python -m ruff check -q .
$python -m ruff format -q --check . || { $python -m ruff format --diff . | head -40; exit 1; }
# A worker of mypy has three seconds to start, which a busy machine may not give it: mypy ends with 2 then.
$python -m mypy --no-error-summary --num-workers "$(nproc)" || { [ $? = 2 ] || exit 1; $python -m mypy --no-error-summary; }
# Scripts and messages have to be valid in databases of every encoding (the script of 0.1.0 is frozen as it was).
mapfile -t sources < <(git ls-files 'pg_tensile/csrc/*.[ch]' 'sql/*.sql' ':!sql/*--0.1.0.sql')
if LC_ALL=C grep -nP '[^\x00-\x7F]' "${sources[@]}"; then
    echo 'lint: C and SQL are ASCII' >&2; exit 1
fi
MAKEFLAGS='' make --no-print-directory -s -j"$(nproc)" all # -Wall -Wextra -Werror, and the SQL scripts in build/
if nm -D --defined-only pg_tensile.so | grep -vE ' (tensile_\w+|pg_finfo_tensile_\w+|_PG_init|Pg_magic_func)(@.*)?$'; then
    echo 'lint: pg_tensile.so exports symbols without its prefix: pg_tensile/csrc/exports.map' >&2; exit 1
fi
if nm -D --defined-only pg_tensile_evaluator.so | grep -vE ' (evaluator_\w+|pfree)(@.*)?$'; then
    echo 'lint: pg_tensile_evaluator.so exports other symbols: pg_tensile/csrc/evaluator/library/exports.map' >&2; exit 1
fi
.venv/bin/shellcheck -x --severity=warning docker/*.sh scripts/*.sh scripts/packages/*.sh debian/bin/* debian/tests/installcheck .ci/run
.venv/bin/hadolint docker/Dockerfile docker/extension.Dockerfile

# pgspot: unsafe search_path use and the like in the extension script. Exceptions, each with its reason:
exceptions=(
    # a procedure with SET search_path can't commit; every name in it is qualified
    --proc-without-search-path 'tensile_internal._await_job(caller oid,job bigint,timeout interval,INOUT state text)'
    --proc-without-search-path 'extschema.wait_for_job_procedure(job bigint,timeout interval,INOUT state text)' # 0.1.0
    # pgspot reads SQL and PL/pgSQL only; these procedures import their module and call it
    --ignore-lang plpython3u
)
for script in sql/pg_tensile--*.sql build/pg_tensile--*.sql; do
    base=sql/$(basename "${script%--*}").sql # an upgrade script replaces functions of this one
    case $script in
        *--*--*) $python -m pgspot --append "${exceptions[@]}" "$base" "$script" ;;
        *) $python -m pgspot "${exceptions[@]}" "$script" ;;
    esac
done
