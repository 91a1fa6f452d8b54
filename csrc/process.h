// Which process this is: a forked child has the engine's memory and none of its threads. Asked several times for each
// tensor, so that it costs no system call.
#pragma once

#include <atomic>

namespace offload {

// The process that it was made in.
class Process {
 public:
  Process() noexcept : forks_(forks()) {}
  bool is_this() const noexcept { return forks() == forks_; }

 private:
  static unsigned forks() noexcept { return count_.load(std::memory_order_relaxed); }
  static const int registered_;
  static std::atomic<unsigned> count_;  // grows in every forked child

  const unsigned forks_;
};

}  // namespace offload
