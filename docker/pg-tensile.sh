#!/bin/bash
# The command pg-tensile in the image, from the package that the server's own processes use.
export PYTHONPATH=/usr/lib/postgresql/$PG_MAJOR/lib/pg_tensile/python
exec /opt/pg_tensile/bin/python -P -m pg_tensile "$@"
