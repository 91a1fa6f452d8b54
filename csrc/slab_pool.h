// Pinned host memory: large slabs registered with the driver, cut into exact-size blocks.
//
// A block is rounded up to 4 KiB only, so one buffer serves DMA and direct I/O. Best fit with coalescing neighbours.
// Reuse is fenced: a block released with an event is not allocated again before that event is done.
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
  size_t used_bytes = 0;        // blocks allocated or still fenced, rounded
  size_t requested_bytes = 0;   // the same blocks as requested
  size_t high_water_bytes = 0;  // most of used_bytes so far
  double registration_seconds = 0;
};

class SlabPool {
 public:
  SlabPool(std::shared_ptr<Driver> driver, size_t max_bytes, size_t slab_bytes = size_t{256} << 20);
  ~SlabPool();
  SlabPool(const SlabPool&) = delete;
  SlabPool& operator=(const SlabPool&) = delete;

  // nullopt if no free range fits and the cap leaves no room for another slab. Throws PinningFailed when pinning fails;
  // nothing changes then. After a refusal, nothing as large is tried again until a slab has been freed, trim() has been
  // called or a minute has passed: a refusal costs as much time as a slab.
  std::optional<Block> try_allocate(size_t bytes);
  // `fence`: the event of the block's last copy; null if no copy is under way.
  void release(const Block& block, EventRef fence);
  // The oldest fence, for a caller that waits for a block; null if there is none.
  EventRef oldest_fence() const;
  // Returns every empty slab to the system. Returns the bytes freed.
  size_t trim();

  size_t free_bytes() const;  // that can still be allocated, fragmentation aside
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
