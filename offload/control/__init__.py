"""Which schedule a step follows, and whether the plan behind it keeps its promise."""
