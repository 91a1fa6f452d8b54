"""`offload demo`: one small model, trained plain and offloaded, and the page that compares them."""
