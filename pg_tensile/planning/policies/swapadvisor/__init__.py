"""SwapAdvisor (Huang, Jin, Li, ASPLOS 2020): a genetic search over the operators' order, memory classes and swaps."""
