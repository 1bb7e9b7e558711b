"""Entry point of a child process: `<pg_tensile.python> -m pyworker trainer`, or another module of children/.

A further argument, the supervisor's process ID, only shows in the list of processes.

The handshake precedes the heavy imports, so that a supervisor can distinguish a Python without them from a child that
dies.
"""

import importlib
import sys
from typing import Any

from pyworker import child
from pyworker.connection import Connection


def run(connection: Connection, hello: dict[str, Any]) -> None:
    """Run the body of the child that the command line names."""
    importlib.import_module(f"pyworker.children.{sys.argv[1]}").run(connection, hello)


if __name__ == "__main__":
    child.main(run)
