// Detects a forked child, which has the engine's memory but none of its threads. The check takes no system call,
// because it runs several times for each tensor.
#pragma once

#include <atomic>

namespace offload {

// Identifies the process in which it was created.
class Process {
 public:
  Process() noexcept : forks_(forks()) {}
  bool is_this() const noexcept { return forks() == forks_; }

 private:
  static unsigned forks() noexcept { return count_.load(std::memory_order_relaxed); }
  static const int registered_;
  static std::atomic<unsigned> count_;  // incremented in every forked child

  const unsigned forks_;
};

}  // namespace offload
