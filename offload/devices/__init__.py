"""The machine: devices and their memory, this process's malloc and control group, CPU use of other processes."""
