"""Private interfaces of torch, used here and nowhere else."""
