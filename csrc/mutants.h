// Names for the guards of the data plane, so that tests can leave each one out and show that it is missed.
//
// In every normal build OFFLOAD_EDGE is its statement and OFFLOAD_BROKEN is false: nothing of this file is compiled in.
// With CMake's -DOFFLOAD_MUTANTS=ON (tests/campaign alone) the guard that break_edge() names is left out at run time;
// freed pool blocks and extents are poisoned, the spill file grows in small steps, and file I/O may pause.
#pragma once

#ifdef OFFLOAD_MUTANTS

#include <atomic>
#include <chrono>
#include <random>
#include <string>
#include <thread>

namespace offload::mutants {

constexpr unsigned char kPoison = 0xDB;

inline std::atomic<const std::string*> broken_edge{nullptr};
inline std::atomic<unsigned> pause_us_max{0};

// Empty: none. Leaks the name, as lanes may still read it.
inline void break_edge(const std::string& name) { broken_edge = name.empty() ? nullptr : new std::string(name); }

inline bool is_broken(const char* edge) {
  const std::string* broken = broken_edge;
  return broken != nullptr && *broken == edge;
}

// Widens the time during which file I/O is under way.
inline void pause() {
  const unsigned most_us = pause_us_max;
  if (most_us == 0) return;
  thread_local std::minstd_rand random(std::random_device{}());
  std::this_thread::sleep_for(std::chrono::microseconds(random() % most_us));
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
