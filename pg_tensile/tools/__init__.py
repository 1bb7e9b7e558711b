"""Programs for people: the command line, the Python client, live view, reports, benchmarks."""
