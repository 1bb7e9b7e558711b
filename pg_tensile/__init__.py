"""pg_tensile, the library: datasets, preprocessing, models and training. No module here knows PostgreSQL.

Modules that must be ready before torch is imported (columns, dataset, preprocessing, metrics, errors) need numpy only.
"""

__version__ = "0.2.0"
