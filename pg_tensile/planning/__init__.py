"""Plans and what they take, before anything runs: traces, plans, policies, the simulator. Needs numpy only."""
