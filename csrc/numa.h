// Places memory near a device. Does nothing if the system does not report the device's node or does not allow a choice.
#pragma once

#include <cstddef>
#include <string>

namespace offload {

// Returns the NUMA node of a PCI device, such as "0000:C1:00.0"; -1 if it is not known or the machine has only one.
int numa_node_of_pci(std::string bus_id, const std::string& sysfs = "/sys");

// Asks the kernel to place the untouched pages of [data, data + bytes) on `node` if it can. -1: does nothing.
void prefer_numa_node(void* data, size_t bytes, int node) noexcept;

}  // namespace offload
