"""Recipes of dropped tensors: recording the operators, extracting recipes from them, and running these."""
