"""Decides what each step does: profile, follow a plan or run a trial; replaces plans that measurements contradict."""
