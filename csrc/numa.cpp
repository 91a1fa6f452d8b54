#include "numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <fstream>

namespace offload {
namespace {

constexpr int kPreferred = 1;  // MPOL_PREFERRED of numaif.h, a header of a separate package
constexpr int kNodesMax = 1024;
constexpr int kBitsPerWord = static_cast<int>(8 * sizeof(unsigned long));

}  // namespace

int numa_node_of_pci(std::string bus_id, const std::string& sysfs) {
  std::string nodes;  // "0", or a list such as "0-1"
  std::ifstream(sysfs + "/devices/system/node/online") >> nodes;
  if (nodes.find_first_of("-,") == std::string::npos) return -1;
  std::transform(bus_id.begin(), bus_id.end(), bus_id.begin(),
                 [](unsigned char letter) { return static_cast<char>(std::tolower(letter)); });
  int node = -1;
  if (!(std::ifstream(sysfs + "/bus/pci/devices/" + bus_id + "/numa_node") >> node)) return -1;
  return node < kNodesMax ? node : -1;
}

void prefer_numa_node(void* data, size_t bytes, int node) noexcept {
  if (node < 0) return;
  std::array<unsigned long, kNodesMax / kBitsPerWord> mask{};
  mask[static_cast<size_t>(node / kBitsPerWord)] = 1UL << (node % kBitsPerWord);
  // The call may be refused, for example in a container. Then the kernel chooses the node, as without this call.
  static_cast<void>(
      syscall(SYS_mbind, data, bytes, kPreferred, mask.data(), static_cast<unsigned long>(kNodesMax), 0U));
}

}  // namespace offload
