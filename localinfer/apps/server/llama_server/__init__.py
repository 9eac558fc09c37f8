"""llama-server's own routes: completions with its fields, infill, slots, properties."""
