"""Training of one job by several processes, its ranks: the operator that exchanges gradients, and the group.

Equal runs of as many ranks have equal bits, whatever the plans, and with the policy none. With two ranks the bits are
those of DistributedDataParallel; with more, the sum of a number depends on its place in a bucket. The order of an
epoch's rows does not depend on the number of ranks: each takes its part of every batch. Batch norm's statistics are
those of a rank's rows; at the end of an epoch all take over rank 0's.

A rank that dies, or fails alone, leaves the others waiting until the process group's time-out. A step that has begun to
exchange gradients is not repeated, so that running out of device memory then ends the run.
"""
