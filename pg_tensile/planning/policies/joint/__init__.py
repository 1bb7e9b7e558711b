"""The default policy: swapping, recomputing and waiting chosen together.

A plan for one job (planner.py) is made in these steps:

1. sweep.py passes over the operators once. Where the next one does not fit, the tensor with the lowest price per byte
   leaves: it is recomputed later, or swapped at the price of the stall that remains where the lanes are full
   (prices.py). A returning tensor takes memory from the operator during which its transfer starts.
2. transfer_times.py gives every transfer its trigger, and `AccessSequence` checks the peak.
3. keep.py removes the events that later decisions have made superfluous. It does the same with the plan that swaps
   everything, which is the answer if no pass succeeds or all are slow.
4. The simulator finds the fastest of the plans of several prices. Small traces get more passes, in which the most
   expensive decisions of the best plan so far cost extra.

Several jobs (share_out.py) get a ladder of such plans each; one rung is chosen for each job, within the memory and the
link. Beside each other on the link (contention.py), plans may count on less than their parts of it.
"""
