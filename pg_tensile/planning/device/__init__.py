"""Model of a device for planning: its memory, its rates, its link to the host."""
