"""Machine learning for PostgreSQL: the library that plans, executes and inspects training on a device.

`planning/` needs numpy only, `execution/` needs PyTorch; neither depends on PostgreSQL. `tools/` holds programs for
people, `client/` the Python client of a server. Modules that must be ready before torch is imported (errors, and
columns, dataset, preprocessing and metrics in execution/data) need numpy only.
"""

__version__ = "0.2.0"
