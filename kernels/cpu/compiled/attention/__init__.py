"""Attention over the paged cache, and what is written into its pages."""
