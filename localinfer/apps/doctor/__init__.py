"""Facts and speed of this machine, and advice to make it faster."""
