"""What the machine has: devices and their memory, this process's malloc, its control group and its neighbours."""
