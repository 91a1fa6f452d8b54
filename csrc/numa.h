// Which memory is near a device. Best effort: where the system does not tell, or does not let us choose, nothing
// happens.
#pragma once

#include <cstddef>
#include <string>

namespace offload {

// The NUMA node of a PCI device, such as "0000:C1:00.0"; -1 where it has none, or the machine has only one.
int numa_node_of_pci(std::string bus_id, const std::string& sysfs = "/sys");

// Lets the pages of [data, data + bytes), not touched yet, come from `node` while it has some. -1: does nothing.
void prefer_numa_node(void* data, size_t bytes, int node) noexcept;

}  // namespace offload
