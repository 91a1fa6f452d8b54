"""Swap stores of every tier, and a source whose bytes are checked when they come back."""

import time

import numpy as np

from offload import _core

TIERS = ["direct", "slab", "slab+disk"]
SCHEDULES = ["threads", "delays", "stepped"]
POISON = 0xDB


def make_store(tier, directory, schedule="threads", seed=0, device=None, **options):
    """`device`: the driver of a device's streams; the lanes' own where None."""
    lanes = _core.HostDriver(schedule=schedule, seed=seed)
    options.setdefault("slice_bytes", 64 << 10)
    if tier == "direct":
        given = {name: options[name] for name in ("slice_bytes", "checks_every_byte") if name in options}
        return _core.SwapStore.direct(lanes, str(directory), **given)
    options.setdefault("host_bytes_max", 1 << 20)
    options.setdefault("slab_bytes", 256 << 10)
    spill_directory = str(directory) if tier == "slab+disk" else ""
    return _core.SwapStore.slab(device or lanes, lanes, spill_directory=spill_directory, **options)


class Source:
    """Some bytes in "device" memory, overwritten with poison once the store no longer reads them."""

    def __init__(self, store, generator, nbytes, residue=0):
        self.block = _core.HostBlock(nbytes, 4096, residue)
        self.array = np.frombuffer(self.block, dtype=np.uint8)
        self.array[:] = generator.integers(0, 256, nbytes, dtype=np.uint8)
        self.expected = self.array.tobytes()
        self.residue = residue
        self.ticket = store.swap_out(self.block.address, nbytes, 0, need=0)

    def wait_copied_out(self):
        self.ticket.wait_out(0)
        while not self.ticket.out_done():  # on a device that orders its stream alone
            time.sleep(0)
        if self.ticket.state not in ("cancelled", "failed"):
            self.array[:] = POISON

    def prefetch(self):
        nbytes = len(self.expected)
        self.target = _core.HostBlock(nbytes, 4096, self.residue)
        np.frombuffer(self.target, dtype=np.uint8)[:] = POISON
        self.ticket.prefetch(self.target.address, 0, self.target)

    def swap_in(self):
        self.ticket.swap_in(0)
        while not self.ticket.in_done():
            time.sleep(0)
        assert np.frombuffer(self.target, dtype=np.uint8).tobytes() == self.expected
