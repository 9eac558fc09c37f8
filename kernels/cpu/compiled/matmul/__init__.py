"""Products of weights, and everything that works on each row by itself."""
