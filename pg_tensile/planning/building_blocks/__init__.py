"""Building blocks shared by the planner of single jobs and the policies."""
