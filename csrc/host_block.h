// A block of RAM that a direct copy-in fills: the memory behind a reloaded CPU tensor.
//
// It is allocated by the process's malloc, so that an allocator that reuses freed memory also reuses this block. Its
// address has a given residue modulo the spill file's alignment. The tensor and the copy in flight share the block; it
// is freed when both have released it.
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
    // The block does not begin at a huge page: such a block would not fit into the space of a freed block of its size.
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
