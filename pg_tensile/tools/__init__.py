"""Programs for people: the command line, the live view, reports, benchmarks."""
