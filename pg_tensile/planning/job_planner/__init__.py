"""Plans for one job: swapping, recomputing and waiting chosen together (`planner.JobPlanner`)."""
