"""The version that SQL, shim and Python must agree on."""

VERSION = "0.1.0"
