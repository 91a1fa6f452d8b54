"""One thin file for each framework; importing one imports its framework, and no other does."""
