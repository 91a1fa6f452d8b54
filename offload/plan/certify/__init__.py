"""Exact plans and lower bounds by mixed-integer programming: how far a plan is from the fastest one."""
