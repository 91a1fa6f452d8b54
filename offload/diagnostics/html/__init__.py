"""The pages: self-contained HTML made of what diagnostics know."""
