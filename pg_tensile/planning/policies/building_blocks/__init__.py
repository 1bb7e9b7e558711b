"""Parts that several policies are made of."""
