"""Processes under PostgreSQL: supervisors in the server (standard library only), their children, the wire."""
