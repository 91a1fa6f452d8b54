"""Conveniences for training loops that have no framework."""
