"""Jobs that are trained by several ranks on a Ray cluster: the driver in the job's process, and the ranks."""
