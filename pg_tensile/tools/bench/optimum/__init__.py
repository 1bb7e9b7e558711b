"""What policies are compared with: bounds that no plan beats, and for small traces the best plan there is.

`bounds` holds for traces of any size and needs numpy only. `best` solves a mixed-integer program (program.py) with
HiGHS, which is a package for development: nothing that runs in the server imports it.
"""
