"""Everything that pg_tensile needs on a machine without a network, in one folder of at most 45 MiB.

`python -m scripts.gpu_bundle` makes the folder where there is a network: the Python packages that the other machine
lacks (packages.py), and PostgreSQL with the extension and all libraries that they load (server.py). There,
`python3 -m scripts.gpu_bundle.unpack` installs it (unpack.py) and says whether everything works (check.py).
docs/without-network.md is for users.

What runs there needs the standard library only: unpack.py, check.py, manifest.py.
"""
