"""The default policy: swapping, recomputing and waiting chosen together."""
