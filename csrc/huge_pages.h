// Asks the kernel for huge pages within a piece of memory: direct I/O and the driver pin page by page, and there are
// 512 times fewer huge ones.
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
    static_cast<void>(  // a kernel may refuse: no harm done
        madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE));
}

}  // namespace offload
