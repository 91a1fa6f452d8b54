// Names of the guards of the data plane. Tests disable one guard at a time and show that the code fails without it.
//
// In normal builds OFFLOAD_EDGE is its statement and OFFLOAD_BROKEN is false: nothing of this file is compiled. With
// CMake's -DOFFLOAD_MUTANTS=ON (only in tests/campaign), break_edge() disables the named guard at run time, freed pool
// blocks and extents are overwritten, and the spill file grows in small steps.
#pragma once

#ifdef OFFLOAD_MUTANTS

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <string>

namespace offload::mutants {

constexpr unsigned char kPoison = 0xDB;

inline std::atomic<const std::string*> broken_edge{nullptr};

// Disables the guard `name`; an empty name enables all. The name is leaked, because lanes may still read it.
inline void break_edge(const std::string& name) { broken_edge = name.empty() ? nullptr : new std::string(name); }

inline bool is_broken(const char* edge) {
  const std::string* broken = broken_edge;
  return broken != nullptr && *broken == edge;
}

// Overwrites whole pages of a file, so that a read that relies on the old bytes fails.
inline void scribble(int descriptor, uint64_t offset, uint64_t bytes) {
  alignas(4096) static const auto junk = [] {
    std::array<unsigned char, 4096> page;
    page.fill(kPoison);
    return page;
  }();
  for (uint64_t at = 0; at < bytes; at += junk.size())
    if (pwrite(descriptor, junk.data(), junk.size(), static_cast<off_t>(offset + at)) < 0) return;
}

}  // namespace offload::mutants

#define OFFLOAD_BROKEN(edge) ::offload::mutants::is_broken(edge)
#define OFFLOAD_EDGE(edge, ...)  \
  do {                           \
    if (!OFFLOAD_BROKEN(edge)) { \
      __VA_ARGS__;               \
    }                            \
  } while (false)

#else

#define OFFLOAD_BROKEN(edge) false
#define OFFLOAD_EDGE(edge, ...) __VA_ARGS__

#endif
