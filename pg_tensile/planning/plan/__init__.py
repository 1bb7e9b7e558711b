"""Plans: their events, their meaning on a trace, and the memory they take."""
