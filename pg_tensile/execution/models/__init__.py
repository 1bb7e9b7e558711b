"""Models: built-in architectures and those of users, all of which map the same Features to outputs [rows, outputs]."""

from pg_tensile.execution.models.registry import (
    build,
    derived_bytes,
    few_rows,
    fused,
    parse,
    takes_ranks,
    text_columns,
    token_limits,
)

__all__ = ["build", "derived_bytes", "few_rows", "fused", "parse", "takes_ranks", "text_columns", "token_limits"]
