"""How far a plan can be from the fastest one: exact solutions and bounds from integer programs."""
