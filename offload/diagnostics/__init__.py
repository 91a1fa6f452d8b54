"""Reports, timelines, out-of-memory notes and recovery."""
