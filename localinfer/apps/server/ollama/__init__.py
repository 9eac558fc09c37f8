"""Ollama's API: its routes, its records, and its lines of JSON."""
