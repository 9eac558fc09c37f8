"""GEMM, and ops that work on each row separately."""
