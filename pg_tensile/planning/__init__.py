"""Planning of memory and time before anything runs: traces, plans, policies, the simulator. Needs numpy only."""
