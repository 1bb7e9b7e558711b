"""The choice among the queries for predictions that the trainer has derived from the training query.

The server's own parser decides, as the role that has submitted the job and with its settings: whether the trainer has
understood the training query, whether a derived query is valid and returns the features, and whether columns are a
unique key (csrc/predicting/prediction_query.c). Standard library only.
"""

from __future__ import annotations

from typing import Any

from pyworker.supervisors.failures import failure_of_sql
from pyworker.supervisors.server import Server

# Partitions have the keys of their table, other children of a table have not.
IS_KEY = """
    SELECT 1 FROM pg_catalog.pg_index i JOIN pg_catalog.pg_class c ON c.oid OPERATOR(pg_catalog.=) i.indrelid
    WHERE c.oid OPERATOR(pg_catalog.=) $1 AND i.indisunique AND i.indisvalid AND i.indimmediate
      AND i.indpred IS NULL AND i.indexprs IS NULL
      AND (c.relkind OPERATOR(pg_catalog.=) 'p' OR NOT c.relhassubclass)
      AND NOT EXISTS (
          SELECT FROM pg_catalog.generate_series(0, i.indnkeyatts OPERATOR(pg_catalog.-) 1) n
               JOIN pg_catalog.pg_attribute a ON a.attrelid OPERATOR(pg_catalog.=) c.oid
                                             AND a.attnum OPERATOR(pg_catalog.=) i.indkey[n]
          WHERE a.attname OPERATOR(pg_catalog.<>) ALL ($2::pg_catalog.name[]))
"""
CHECK = "tensile_worker._check_prediction_query(int8,text,text,jsonb)"
TABLES = ("table", "partitioned table")


class Judge:
    """Judges derived queries for a version of the job's model; `row` is what `_job_begin` returned, and `sources` what
    the training query reads."""

    def __init__(self, server: Server, version: int | None, row: dict[str, Any], sources: list[dict[str, Any]]) -> None:
        self._server = server
        self._version = version
        self._query = row["query"]
        self._settings = row["settings"]
        self._sources = [source for source in sources if source["purpose"] == "training"]

    def chosen(self, derived: dict[str, Any]) -> dict[str, Any]:
        """Return what the version keeps: query, template, source and reason; see docs/internals.md."""
        reason = derived["reason"]
        if reason is None:
            reason = self._misunderstanding(derived["printed"])
        if reason is None:
            for variant in derived["variants"]:
                if all(self._is_key(key) for key in variant["keys"]):
                    reason = self._refusal(variant["query"])
                    if reason is None:
                        return self._with_template(variant)
        return {"query": None, "template": None, "source": None, "reason": reason}

    def _misunderstanding(self, printed: str) -> str | None:
        try:
            same = self._server.call(
                "tensile_worker._same_query(text,text,jsonb)", self._query, printed, self._settings
            )
        except self._server.plpy.spiexceptions.QueryCanceled:
            raise
        except self._server.plpy.SPIError as error:
            return f"the training query cannot be printed again: {failure_of_sql(error).message}"
        return None if same else "the training query cannot be printed again as it was"

    def _is_key(self, key: dict[str, Any]) -> bool:
        """Return whether the columns of a table that the training query reads are unique, as far as that is certain."""
        found = [
            source
            for source in self._sources
            if source["name"] == key["table"] and key["schema"] in (None, source["schema"])
        ]
        if len(found) != 1 or found[0]["kind"] not in TABLES:
            return False
        return bool(self._server.rows(IS_KEY, ("oid", "text[]"), found[0]["relation"], key["columns"]))

    def _refusal(self, query: str) -> str | None:
        """Return why the server does not accept a derived query; None if it does."""
        try:
            self._server.call(CHECK, self._version, self._query, query, self._settings)
        except self._server.plpy.spiexceptions.QueryCanceled:
            raise
        except self._server.plpy.SPIError as error:
            return f"the server refuses the query without the target: {failure_of_sql(error).message}"
        return None

    def _with_template(self, variant: dict[str, Any]) -> dict[str, Any]:
        kept = {"query": variant["query"], "template": None, "source": variant["source"]}
        if variant["template"] is None:
            return kept | {"reason": "the training query does not begin with a table"}
        over_source = f"WITH tensile_source AS (SELECT * FROM {variant['source']}) ({variant['template']})"
        reason = self._refusal(over_source)
        return kept | {"template": variant["template"] if reason is None else None, "reason": reason}
