"""Recurrent ops: what carries a state from row to row of a sequence."""
