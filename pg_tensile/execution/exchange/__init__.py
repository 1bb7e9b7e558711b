"""Models in files: reading and checking what comes from elsewhere, and predictions without a server."""
