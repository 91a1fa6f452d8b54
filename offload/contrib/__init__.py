"""Helpers for training loops without a framework."""
