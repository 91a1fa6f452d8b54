// A piece of plain RAM that a direct copy-in fills: the memory behind a reloaded CPU tensor.
//
// Comes from the process's own malloc, so that a recycling allocator recycles it, at an address with a given residue
// modulo the spill file's alignment. Shared by the tensor and by the copy under way, whichever lasts longer.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

#include "huge_pages.h"

namespace offload {

class HostBlock {
 public:
  HostBlock(size_t block_bytes, size_t alignment_bytes, size_t residue) : bytes_(block_bytes) {
    void* base = nullptr;
    if (posix_memalign(&base, std::max(alignment_bytes, sizeof(void*)), block_bytes + residue)) throw std::bad_alloc();
    // Not a block that begins on a huge page: that would not fit where another of its size has been freed.
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
  char* base_ = nullptr;
  char* data_ = nullptr;
  size_t bytes_;
};

}  // namespace offload
