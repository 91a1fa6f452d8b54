// Holds every implementation of CRC32C that this processor can run against the one by table, and all against known
// values. Prints the names of those that ran; any difference ends the program with a line that says where.
#include <cstdio>
#include <random>
#include <vector>

#include "checksum.cpp"

namespace offload {
namespace {

struct Implementation {
  const char* name;
  Update update;
};

uint32_t bit_by_bit(uint32_t crc, const uint8_t* data, size_t bytes) {
  for (; bytes > 0; ++data, --bytes) {
    crc ^= *data;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1U) ? kPolynomial : 0U);
  }
  return crc;
}

std::vector<Implementation> implementations() {
  std::vector<Implementation> found = {{"table", table_update}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) found.push_back({"lanes", lanes_update});
  if (best_kernels().bytes == folding_update) found.push_back({"folding", folding_update});
#elif defined(__aarch64__)
  if (best_kernels().bytes == lanes_update) found.push_back({"lanes", lanes_update});
#endif
  return found;
}

bool is_right(const Implementation& each) {
  const char* const digits = "123456789";
  const uint32_t of_digits = ~each.update(~0U, reinterpret_cast<const uint8_t*>(digits), 9);
  const std::vector<uint8_t> zeros(32, 0);  // RFC 3720, B.4
  const uint32_t of_zeros = ~each.update(~0U, zeros.data(), zeros.size());
  if (of_digits != 0xE3069283U || of_zeros != 0x8A9136AAU) {
    std::printf("%s: %08x of nine digits, %08x of 32 zero bytes\n", each.name, of_digits, of_zeros);
    return false;
  }
  std::mt19937_64 random(1);
  std::vector<uint8_t> data(600 << 10);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(random());
  for (int round = 0; round < 3000; ++round) {
    // Every short length at every alignment, then lengths around the lanes' and beyond.
    const size_t at = random() % 64;
    const size_t bytes = round < 2000 ? static_cast<size_t>(round) / 4 : random() % (data.size() - at);
    const auto start = static_cast<uint32_t>(random());
    const Update reference = round < 2000 ? bit_by_bit : table_update;
    if (each.update(start, &data[at], bytes) == reference(start, &data[at], bytes)) continue;
    std::printf("%s differs: %zu bytes at %zu\n", each.name, bytes, at);
    return false;
  }
  return true;
}

// Compares the version that this processor chooses with the one by table (which may be the same).
bool blocks_agree() {
  std::mt19937_64 random(2);
  std::vector<uint8_t> data(20 * kBlockBytes + 8);
  for (uint8_t& byte : data) byte = static_cast<uint8_t>(random());
  for (int round = 0; round < 500; ++round) {
    const uint64_t first = random() % (1U << 20);
    const uint64_t end = first + random() % 20;
    const uint8_t* const begin = &data[random() % 8];
    const auto start = static_cast<uint32_t>(random());
    if (best_kernels().blocks(start, begin, first, end) == table_blocks(start, begin, first, end)) continue;
    std::printf("blocks differ: %d from number %d\n", static_cast<int>(end - first), static_cast<int>(first));
    return false;
  }
  return true;
}

}  // namespace
}  // namespace offload

int main() {
  for (const offload::Implementation& each : offload::implementations()) {
    if (!offload::is_right(each)) return 1;
    std::printf("%s\n", each.name);
  }
  return offload::blocks_agree() ? 0 : 1;
}
