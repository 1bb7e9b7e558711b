"""`<pg_tensile.python> -m pyworker executor` (or `predictor`): a child process of a supervisor.

The handshake comes before the heavy imports, so that a Python without them is told from a child that dies.
"""

import importlib
import sys
from typing import Any

from pyworker import child
from pyworker.wire import Connection


def run(connection: Connection, hello: dict[str, Any]) -> None:
    """The body of the child that the command line names."""
    importlib.import_module(f"pyworker.children.{sys.argv[1]}").run(connection, hello)


if __name__ == "__main__":
    child.main(run)
