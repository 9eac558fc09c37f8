"""What the person who runs a server sees of it and sets: metrics, logs, traces, limits."""
