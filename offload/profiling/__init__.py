"""What one training step does: its order, times, memory and model state, and how fast the link is."""
