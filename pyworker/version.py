"""Version that SQL, shim and Python must agree on."""

VERSION = "0.2.0"
