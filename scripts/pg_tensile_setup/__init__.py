"""pg-tensile-setup: make the environment of pg_tensile's child processes, PyTorch above all, from a lock file.

    pg-tensile-setup [--cpu | --cuda | --torch-index URL]
    pg-tensile-setup --download FOLDER     on a machine with a network, for one without it:
    pg-tensile-setup --find-links FOLDER
    pg-tensile-setup --check
    pg-tensile-setup --remove

choice.py reads the lock file and chooses among the builds of PyTorch, pip.py fetches and unpacks wheels,
environments.py makes, checks and removes environments, clusters.py finds clusters that preload the library, __main__.py
is the command. All of it needs Python's standard library only; the Debian package pg-tensile-common has it in
/usr/share/pg-tensile.
"""
