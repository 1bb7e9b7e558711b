"""Training of one job by several processes, its ranks: the operator that exchanges gradients, and the group."""
