"""Which schedule a step follows, and whether measured steps agree with its plan."""
