"""Decisions about all jobs of a device: admission, shares, plans."""
