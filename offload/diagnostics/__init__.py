"""Explanations for people: reports, timelines, out-of-memory notes, the machine's check-up."""
