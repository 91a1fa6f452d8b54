// Pinned host memory: large slabs registered with the driver, cut into exact-size blocks.
//
// A block is rounded up to 4 KiB only, so one buffer serves DMA and direct I/O. Best fit with coalescing neighbours.
// Reuse is fenced: a block released with an event is not handed out before that event is done, whoever dropped it.
// The pool never holds more than `max_bytes`. Not thread safe: the swap store calls it under its lock. Blocks and
// slabs belong to the pool; slabs are unregistered when it is destroyed or trimmed.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "error.h"
#include "event_pool.h"
#include "extent_map.h"

namespace offload {

constexpr size_t kPageBytes = 4096;

struct Block {
  char* data = nullptr;
  size_t bytes = 0;  // as requested
  size_t slab = 0;   // index of its slab

  explicit operator bool() const { return data != nullptr; }
};

struct PoolStats {
  size_t max_bytes = 0;
  size_t held_bytes = 0;        // slabs, pinned
  size_t used_bytes = 0;        // blocks handed out or still fenced, rounded
  size_t requested_bytes = 0;   // the same blocks as asked for
  size_t high_water_bytes = 0;  // most of used_bytes so far
  double registration_seconds = 0;
};

class SlabPool {
 public:
  SlabPool(std::shared_ptr<Driver> driver, size_t max_bytes, size_t slab_bytes = size_t{256} << 20);
  ~SlabPool();
  SlabPool(const SlabPool&) = delete;
  SlabPool& operator=(const SlabPool&) = delete;

  // nullopt where no free range fits and the cap leaves no room for a slab that would. Throws PinningFailed when
  // pinning fails; nothing is held then that was not held before. What was refused once is not asked for again, nor
  // anything larger, before a slab has been given back, trim() called or a minute passed: a refusal costs as much as a
  // slab.
  std::optional<Block> try_allocate(size_t bytes);
  // `fence`: the last event after which nobody touches the block; null when nobody does any more.
  void release(const Block& block, EventRef fence);
  // The fence that has waited longest, for a caller that wants to wait for a block; null where none is pending.
  EventRef oldest_fence() const;
  // Gives every slab without blocks back to the system. Returns the bytes given back.
  size_t trim();

  size_t free_bytes() const;  // what could still be handed out in all, fragmentation aside
  size_t max_bytes() const { return max_bytes_; }
  size_t largest_slab_bytes() const;
  PoolStats stats();

 private:
  struct Slab {
    char* data = nullptr;  // null once trimmed
    size_t bytes = 0;
    ExtentMap free{kPageBytes};
  };
  struct Fenced {
    Block block;
    EventRef fence;
  };

  void sweep();
  bool grow(size_t bytes);
  Slab& empty_slab();
  size_t drop_empty_slabs();
  std::optional<Block> take(size_t bytes);
  void give_back(const Block& block);

  const std::shared_ptr<Driver> driver_;
  const size_t max_bytes_;
  const size_t slab_bytes_;
  const int numa_node_;
  std::vector<Slab> slabs_;
  std::deque<Fenced> fenced_;
  PoolStats stats_;
  std::optional<PinningFailed> refusal_;
  size_t refused_bytes_ = 0;  // by refusal_
  std::chrono::steady_clock::time_point asked_again_at_;
};

// `bytes` of zeroed pages, near NUMA node `node` where that is not -1, touched by several threads so that registering
// them does not have to.
char* map_pages(size_t bytes, int node = -1);
void unmap_pages(char* data, size_t bytes) noexcept;

}  // namespace offload
