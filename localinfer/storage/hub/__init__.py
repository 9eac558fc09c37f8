"""Models by name: pulled from the Hugging Face hub, and found where other programs keep theirs."""
