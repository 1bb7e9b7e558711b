"""How long operators take: estimated before the first iteration, measured and corrected later."""
