"""Observability of a server, and its limits: metrics, logs, traces, service managers."""
