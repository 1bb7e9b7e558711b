"""Latency of operators: estimated before the first iteration, then measured and corrected."""
