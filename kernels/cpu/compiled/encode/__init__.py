"""Weights to quantized blocks, sixteen rows at a time."""
