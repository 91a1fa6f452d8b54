"""Dropped tensors: recipes, operator by operator, and what it takes to find and to run them."""
