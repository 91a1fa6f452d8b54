"""The data path in Python: autograd's hooks, the schedule that they follow, and the engine that moves bytes."""
