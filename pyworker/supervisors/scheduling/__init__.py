"""The scheduler's parts: records of jobs, views of devices, the planner's client, publication, searches."""
