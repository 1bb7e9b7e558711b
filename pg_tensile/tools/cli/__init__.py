"""The command `pg-tensile`."""
