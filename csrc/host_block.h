// A piece of plain RAM that a direct copy-in fills: the memory behind a reloaded CPU tensor.
//
// Comes from the process's own malloc, so that a recycling allocator recycles it, at an address with a given residue
// modulo the spill file's alignment. Shared by the tensor and by the copy under way, whichever lasts longer.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace offload {

class HostBlock {
 public:
  HostBlock(size_t block_bytes, size_t alignment_bytes, size_t residue) : bytes_(block_bytes) {
    void* base = nullptr;
    if (posix_memalign(&base, std::max(alignment_bytes, sizeof(void*)), block_bytes + residue)) throw std::bad_alloc();
    ask_for_huge_pages(static_cast<char*>(base), block_bytes + residue);
    base_ = static_cast<char*>(base);
    data_ = base_ + residue;
  }
  ~HostBlock() { std::free(base_); }
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  // Direct I/O pins page by page: of huge ones there are 512 times fewer. Asked for where whole ones lie within the
  // block, and not for a block that begins on one: that would not fit where another of its size has been freed.
  static void ask_for_huge_pages(char* begin, size_t bytes) {
    constexpr uintptr_t kHugePageBytes = uintptr_t{2} << 20;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
    const uintptr_t end = (reinterpret_cast<uintptr_t>(begin) + bytes) / kHugePageBytes * kHugePageBytes;
    if (first < end)
      static_cast<void>(  // a kernel may refuse: no harm done
          madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE));
  }

  char* base_ = nullptr;
  char* data_ = nullptr;
  size_t bytes_;
};

}  // namespace offload
