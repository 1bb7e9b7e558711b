"""Scheduling of all jobs of a device: admission, shares of memory and link, plans."""
