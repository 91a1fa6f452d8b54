"""Parameters that are in the store while no module uses them."""
