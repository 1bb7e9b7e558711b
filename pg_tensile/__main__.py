"""Entry point of `python -m pg_tensile`, which is the command `pg-tensile`."""

import sys

from pg_tensile.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
