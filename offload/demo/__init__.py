"""`offload demo`: trains one small model with and without offload, and writes a page that compares both."""
