"""Token ids: texts to them, and what followed them before."""
