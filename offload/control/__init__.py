"""Decides whether a step is profiled, follows a plan or runs a trial. Replaces plans that measurements contradict."""
