"""The demo: two models train at once inside a PostgreSQL of its own, from real tables, and are used in queries."""
