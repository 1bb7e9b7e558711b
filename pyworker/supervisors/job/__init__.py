"""The worker's parts: one job's spec, memory, progress, results and end."""
