// Pinned host memory: large slabs registered with the driver, divided into blocks of any size.
//
// A block takes its size rounded up to a multiple of 4 KiB, so that it serves both DMA and direct I/O. Allocation is
// best fit; adjacent free ranges are merged. Reuse is fenced: a block released with an event is not allocated again
// before that event is done. The pool never holds more than `max_bytes`. Not thread safe: the swap store calls it under
// its lock. Blocks and slabs belong to the pool; slabs are unregistered when it is destroyed or trimmed.
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
  size_t held_bytes = 0;        // bytes of all slabs; they are pinned
  size_t used_bytes = 0;        // bytes of blocks that are allocated or still fenced, rounded up
  size_t requested_bytes = 0;   // bytes requested for the same blocks
  size_t high_water_bytes = 0;  // maximum of used_bytes since restart_high_water
  double registration_seconds = 0;
};

class SlabPool {
 public:
  SlabPool(std::shared_ptr<Driver> driver, size_t max_bytes, size_t slab_bytes = size_t{256} << 20);
  ~SlabPool();
  SlabPool(const SlabPool&) = delete;
  SlabPool& operator=(const SlabPool&) = delete;

  // Returns nullopt if no free range fits and the cap leaves no room for another slab. Throws PinningFailed, with
  // nothing allocated, if the driver cannot pin a new slab. A failed attempt takes as long as pinning. So after a
  // failure, a new slab of the same size or more is refused without an attempt, until a slab has been freed, trim has
  // been called or a minute has passed.
  std::optional<Block> try_allocate(size_t bytes);
  // Releases a block. `fence`: the event of the block's last copy; null if no copy is in flight.
  void release(const Block& block, EventRef fence);
  // Returns the oldest fence, for a caller that waits for a block; null if there is none.
  EventRef oldest_fence() const;
  // Unregisters and frees empty slabs, as long as the others hold at least `keep_bytes`. Returns the bytes freed.
  size_t trim(size_t keep_bytes);
  void restart_high_water() { stats_.high_water_bytes = stats_.used_bytes; }

  size_t free_bytes() const;  // bytes that can still be allocated, apart from fragmentation
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
  size_t drop_empty_slabs(size_t keep_bytes);
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
  size_t refused_bytes_ = 0;  // size of the slab for which pinning failed
  std::chrono::steady_clock::time_point asked_again_at_;
};

// Maps `bytes` bytes of zeroed pages, preferably on NUMA node `node` (-1: any node). Several threads touch the pages,
// so that registering them with the driver takes less time. Throws std::bad_alloc.
char* map_pages(size_t bytes, int node = -1);
void unmap_pages(char* data, size_t bytes) noexcept;

}  // namespace offload
