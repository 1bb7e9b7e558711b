"""Reports about a job: an HTML page that opens offline (page.py) and trace events (trace_events.py).

Both are made from a JobRecord (pg_tensile.client.record) alone, without access to a server.
"""
