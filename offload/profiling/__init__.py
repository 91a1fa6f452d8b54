"""Measures a training step (order, times, memory, model state) and the speed of the link."""
