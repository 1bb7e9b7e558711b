"""Rows of a query as columns, fitted preprocessing, datasets and batches. Only batches.py needs torch."""
