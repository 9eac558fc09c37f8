"""localinfer: a quantized LLM runtime for one person on their own machine."""
