"""`make first-gpu-run PART=N`: what a GPU has to show about pg_tensile, in parts that each end by themselves.

A machine with a GPU may be at hand for half an hour only, one command on it may run ten minutes at most, and only what
has been written by then comes back. So there are six parts (parts.py), ordered by what they are worth. Each ends within
LIMIT_S seconds, and writes its page and its results after every step: a step that fails does not keep the next from
running, and one for which there is no time is named.

`--device emulated --quick` runs a part on the emulated accelerator of the tests, with small networks.
"""

LIMIT_S = 540
