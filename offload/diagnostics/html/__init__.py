"""Self-contained HTML pages of the diagnostics."""
