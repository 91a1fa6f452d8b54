// Memory near a device. Best effort: does nothing if the system does not report the node or does not allow a choice.
#pragma once

#include <cstddef>
#include <string>

namespace offload {

// The NUMA node of a PCI device, such as "0000:C1:00.0"; -1 if it has none or the machine has only one.
int numa_node_of_pci(std::string bus_id, const std::string& sysfs = "/sys");

// Prefers `node` for the pages of [data, data + bytes) that have not been touched yet. -1: does nothing.
void prefer_numa_node(void* data, size_t bytes, int node) noexcept;

}  // namespace offload
