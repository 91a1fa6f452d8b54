"""Pinned memory near the GPU: what sysfs tells about a device, and what to do where it does not."""

import pytest

from offload import _core


def plant(root, nodes, node):
    system = root / "devices/system/node"
    system.mkdir(parents=True)
    (system / "online").write_text(f"{nodes}\n")
    device = root / "bus/pci/devices/0000:c1:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text(f"{node}\n")
    return str(root)


@pytest.mark.parametrize(
    ("nodes", "node", "expected"), [("0-1", 1, 1), ("0-1", 0, 0), ("0,2", 2, 2), ("0", 0, -1), ("0-1", -1, -1)]
)
def test_the_devices_node(tmp_path, nodes, node, expected):
    assert _core.numa_node_of_pci("0000:C1:00.0", plant(tmp_path, nodes, node)) == expected


def test_nobody_tells(tmp_path):
    assert _core.numa_node_of_pci("0000:C1:00.0", str(tmp_path)) == -1
    assert _core.numa_node_of_pci("0000:C2:00.0", plant(tmp_path, "0-1", 1)) == -1


@pytest.mark.parametrize("node", [-1, 0, 1023])
def test_pages_are_there_whatever_the_system_says(node):
    assert _core.pages_near(1 << 20, node) == bytes(1 << 20)


def test_a_device_is_asked_for_its_node(tmp_path, fake_cuda):
    before = fake_cuda.count("cuDeviceGetPCIBusId")
    lanes = _core.HostDriver()
    store = _core.SwapStore.slab(fake_cuda.driver(), lanes, 1 << 20, str(tmp_path))
    assert store.stats()["pool_held_bytes"] > 0
    assert fake_cuda.count("cuDeviceGetPCIBusId") == before + 1
