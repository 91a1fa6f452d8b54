"""What the store notices if other bytes are in the spill file than it has written."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest
from core.store_rig import Source, make_store
from core.test_checksum import second_line


def spill_file_of(folder):
    """A descriptor of the file of this process that is in a folder and has no name."""
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists this folder
            if str(each.readlink()).startswith(f"{folder}/"):
                return os.open(each, os.O_RDWR)
    raise AssertionError(f"no file in {folder}")


@pytest.mark.parametrize("tier", ["direct", "slab+disk"])
@pytest.mark.parametrize(
    ("checks_every_byte", "nbytes", "is_noticed"), [(False, 4096, True), (False, 1, False), (True, 1, True)]
)
def test_what_another_program_writes_into_the_file(tier, checks_every_byte, nbytes, is_noticed, tmp_path):
    """By default only wrong blocks are noticed."""
    store = make_store(tier, tmp_path, host_bytes_max=256 << 10, checks_every_byte=checks_every_byte)
    sources = [Source(store, np.random.default_rng(seed), 150_000) for seed in range(3)]
    for each in sources:
        each.wait_copied_out()
    store.quiesce()
    source = sources[0]
    assert source.ticket.state == "on_disk"
    descriptor, blocks = spill_file_of(tmp_path), range(30)  # of this tensor: the first in the file
    for block in blocks:
        lines = [0, second_line(block)]
        at = 4096 * block + (0 if nbytes > 1 else next(line for line in range(64, 4096, 64) if line not in lines))
        os.pwrite(descriptor, bytes(byte ^ 1 for byte in os.pread(descriptor, nbytes, at)), at)
    os.close(descriptor)
    source.prefetch()
    with pytest.raises(OSError if is_noticed else AssertionError) as raised:
        source.swap_in()
    assert ("do not match their checksum" in str(raised.value)) == is_noticed
