"""The models that a server has: on disk, loaded on demand, and unloaded."""
