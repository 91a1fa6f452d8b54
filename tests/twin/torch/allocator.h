// Device memory as torch's caching allocator gives it out: stream-ordered, from segments that are split and kept.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <map>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "device.h"

namespace sim {

// One device's. Blocks belong to the stream they were allocated on and go back to it at once when they are freed; those
// that another stream has used, when that has come past. What is given out is overwritten first, in stream order.
class DeviceMemory {
 public:
  explicit DeviceMemory(DeviceIndex device);

  char* allocate(size_t bytes, StreamId stream);
  void free(char* address);
  void use(char* address, StreamId stream);
  void release_cached();
  c10::CachingDeviceAllocator::DeviceStats stats();
  void reset_peaks();
  void fail_at(int nth);  // the nth allocation from now on finds no memory; 0: none

 private:
  struct Block {
    size_t bytes = 0;
    size_t requested_bytes = 0;
    char* segment = nullptr;
    StreamId stream = 0;
    bool is_free = true;
    std::set<StreamId> used_by;
  };
  using Blocks = std::map<char*, Block>;
  struct Pending {
    Blocks::iterator block;
    std::vector<EventHandle> events;
  };
  struct Segment {
    size_t bytes = 0;
    bool is_small = false;
  };
  using FreeKey = std::tuple<StreamId, bool, size_t, char*>;  // stream, small, bytes, address

  [[noreturn]] void out_of_memory(size_t bytes);
  FreeKey key_of(const Blocks::iterator& block) const;
  Blocks::iterator find_free(size_t bytes, bool is_small, StreamId stream);
  Blocks::iterator new_segment(size_t bytes, bool is_small, StreamId stream);
  void split(const Blocks::iterator& block, size_t bytes);
  void settle();
  void cache(Blocks::iterator block);
  void poison(char* address, size_t bytes, StreamId stream);
  void release_segments();
  void count(c10::CachingAllocator::StatArray& stat, bool is_small, int64_t change);
  void tell_profiler(char* address, int64_t bytes);

  const DeviceIndex device_;
  std::mutex mutex_;
  Blocks blocks_;
  std::map<char*, Segment> segments_;
  std::set<FreeKey> free_;
  std::vector<Pending> pending_;
  std::map<char*, size_t> ranges_;  // of the window: in no segment
  int fails_in_ = 0;
  c10::CachingDeviceAllocator::DeviceStats stats_;
};

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, std::size_t bytes) const override;
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override;
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override;
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override;
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override;
};

Allocator& allocator();

}  // namespace sim
