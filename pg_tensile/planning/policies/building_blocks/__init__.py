"""Building blocks shared by several policies."""
