// A piece of plain RAM that a direct copy-in fills: the memory behind a reloaded CPU tensor.
//
// Comes from the process's own malloc, so that a recycling allocator recycles it, at an address with a given residue
// modulo the spill file's alignment. Shared by the tensor and by the copy under way, whichever lasts longer.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace offload {

class HostBlock {
 public:
  HostBlock(size_t block_bytes, size_t alignment_bytes, size_t residue) : bytes_(block_bytes) {
    const size_t huge_bytes = (block_bytes + residue) / kHugePageBytes * kHugePageBytes;
    void* base = nullptr;
    if (posix_memalign(&base, std::max(alignment_bytes, huge_bytes > 0 ? kHugePageBytes : sizeof(void*)),
                       block_bytes + residue))
      throw std::bad_alloc();
    // Direct I/O pins page by page: of huge ones there are 512 times fewer. Only whole ones, so that no memory is taken
    // beyond the block. A kernel that refuses leaves it as it is.
    if (huge_bytes > 0) static_cast<void>(madvise(base, huge_bytes, MADV_HUGEPAGE));
    base_ = static_cast<char*>(base);
    data_ = base_ + residue;
  }
  ~HostBlock() { std::free(base_); }
  HostBlock(const HostBlock&) = delete;
  HostBlock& operator=(const HostBlock&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  static constexpr size_t kHugePageBytes = size_t{2} << 20;

  char* base_ = nullptr;
  char* data_ = nullptr;
  size_t bytes_;
};

}  // namespace offload
