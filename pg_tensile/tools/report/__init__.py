"""What a job was and did, for people: a page that opens offline (page.py) and trace events (trace_events.py).

Both are made of a JobRecord (pg_tensile.client.record) and of nothing else: no server is asked here.
"""
