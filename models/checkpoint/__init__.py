"""Hugging Face folders: config.json, safetensors and tokenizer.json, read as the GGUF file they would convert to."""
