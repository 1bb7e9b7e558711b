"""A device as planning sees it: its memory, its rates, its link to the host."""
