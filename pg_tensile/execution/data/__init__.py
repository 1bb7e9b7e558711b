"""Rows of a query as columns, fitted preprocessing, datasets and batches. Needs numpy only."""
