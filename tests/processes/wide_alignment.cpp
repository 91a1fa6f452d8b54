// Preloaded into a process: a file system whose direct I/O wants WIDE_ALIGNMENT bytes.
#include <dlfcn.h>
#include <sys/stat.h>

#include <cstdlib>

extern "C" __attribute__((visibility("default"))) int statx(int folder, const char* path, int flags, unsigned mask,
                                                            struct statx* about) noexcept {
  using Statx = int(int, const char*, int, unsigned, struct statx*);
  const int result = reinterpret_cast<Statx*>(dlsym(RTLD_NEXT, "statx"))(folder, path, flags, mask, about);
#ifdef STATX_DIOALIGN
  if (result == 0 && (mask & STATX_DIOALIGN) != 0) {
    about->stx_mask |= STATX_DIOALIGN;
    about->stx_dio_mem_align = 512;
    about->stx_dio_offset_align = static_cast<unsigned>(std::atoi(std::getenv("WIDE_ALIGNMENT")));
  }
#endif
  return result;
}
