"""Pinned memory that goes back while the store is in use."""

import numpy as np
from core.store_rig import Source, make_store


def test_a_trimmed_pool_keeps_as_much_as_it_is_told(tmp_path):
    store = make_store("slab", tmp_path, host_bytes_max=2 << 20)
    generator = np.random.default_rng(0)
    slab_bytes = 256 << 10

    def use(count):
        sources = [Source(store, generator, slab_bytes) for _ in range(count)]
        for source in sources:
            source.wait_copied_out()
            source.ticket.release()
        store.quiesce()

    use(6)
    assert store.stats()["pool_held_bytes"] == store.stats()["pool_high_water_bytes"] == 6 * slab_bytes
    store.restart_high_water()
    use(2)
    assert store.stats()["pool_high_water_bytes"] == 2 * slab_bytes
    assert store.trim_pool(2 * slab_bytes + 1) == 3 * slab_bytes
    assert store.trim_pool(3 * slab_bytes) == 0
    assert store.trim() == 3 * slab_bytes
    assert store.stats()["pool_held_bytes"] == 0
