"""Background workers' Python, inside the server: standard library only."""
