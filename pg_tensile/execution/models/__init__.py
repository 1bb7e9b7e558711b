"""Models: built-in architectures and those of users, all of which map the same Features to outputs [rows, outputs]."""

from pg_tensile.execution.models.mlp import few_rows
from pg_tensile.execution.models.registry import build, parse, text_columns, token_limits

__all__ = ["build", "few_rows", "parse", "text_columns", "token_limits"]
