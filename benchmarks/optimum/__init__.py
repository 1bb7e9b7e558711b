"""References for policies: bounds that no plan beats, and for small traces the best plan.

`bounds` (in planning/) holds for traces of any size and needs numpy and scipy. `best` solves a mixed-integer program
(program.py) with HiGHS, which is a package for development: nothing that runs in the server imports it.
"""
