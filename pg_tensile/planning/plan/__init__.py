"""Plans: their events, their meaning on a trace, and the memory that they need."""
