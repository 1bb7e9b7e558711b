"""Python of the background workers, inside the server: standard library only."""
