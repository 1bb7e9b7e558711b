"""Queries as trees: the query for predictions of a training query, and statements of other dialects of SQL. Based on
sqlglot. What runs is decided by the server's own parser, which gets every result as text."""
