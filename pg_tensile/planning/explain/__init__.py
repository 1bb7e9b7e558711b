"""Explanation of a job before it runs: EXPLAIN for training."""
