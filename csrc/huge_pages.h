// Asks the kernel for huge pages in a range of memory: direct I/O and the driver pin each page, and a huge page
// replaces 512 small ones.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace offload {

inline void ask_for_huge_pages(char* begin, size_t bytes) noexcept {
  constexpr uintptr_t kHugePageBytes = uintptr_t{2} << 20;
  const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + kHugePageBytes - 1) / kHugePageBytes * kHugePageBytes;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(begin) + bytes) / kHugePageBytes * kHugePageBytes;
  if (first < end)
    static_cast<void>(  // if the kernel refuses, the pages stay small
        madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE));
}

}  // namespace offload
