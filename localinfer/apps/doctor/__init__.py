"""What this machine has, how fast it is, and what would make it faster."""
