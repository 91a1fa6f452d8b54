"""Optimizer state that is in the swap store between optimizer steps."""
