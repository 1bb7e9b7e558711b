#!/bin/bash
# Everything that reads the code without running it; stops at the first complaint.
set -eu
cd "$(dirname "$0")/.."
python=.venv/bin/python

$python -m ruff check -q .
$python -m ruff format -q --check . || { $python -m ruff format --diff . | head -40; exit 1; }
$python -m mypy --no-error-summary
make --no-print-directory -s all # -Wall -Wextra -Werror
.venv/bin/shellcheck -x --severity=warning docker/*.sh scripts/*.sh .ci/run
.venv/bin/hadolint docker/Dockerfile

# pgspot: unsafe search_path use and the like in the extension script. Exceptions, each with its reason:
exceptions=(
    # a procedure with SET search_path can't commit; every name in it is qualified
    --proc-without-search-path 'extschema.wait_for_job_procedure(job bigint,timeout interval,INOUT state text)'
    # pgspot reads SQL and PL/pgSQL only; these procedures import their module and call it
    --ignore-lang plpython3u
)
$python -m pgspot "${exceptions[@]}" sql/*.sql
