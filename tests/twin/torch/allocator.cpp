#include "allocator.h"

#include "cost.h"

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <sstream>

namespace sim {
namespace {

// CUDA's caching allocator's.
constexpr size_t kBlockBytesMin = 512;
constexpr size_t kSmallBytesMax = size_t{1} << 20;
constexpr size_t kSmallSegmentBytes = size_t{2} << 20;
constexpr size_t kLargeSegmentBytes = size_t{20} << 20;
constexpr size_t kOwnSegmentBytesMin = size_t{10} << 20;
constexpr unsigned char kPoison = 0xFF;  // not a number; as an index, out of range

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

std::string in_mebibytes(size_t bytes) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << static_cast<double>(bytes) / (1 << 20) << " MiB";
  return text.str();
}

DeviceMemory& device_memory(DeviceIndex device) {
  static auto* const memories = new std::array<DeviceMemory, kDevices>{DeviceMemory(0), DeviceMemory(1)};
  return (*memories)[static_cast<size_t>(device < 0 ? current_device() : device)];
}

}  // namespace

DeviceMemory::DeviceMemory(DeviceIndex device) : device_(device) {
  size_t bytes = 0;
  char* const base = sim_memory(device, &bytes);
  ranges_[base] = bytes;
}

void DeviceMemory::count(c10::CachingAllocator::StatArray& stat, bool is_small, int64_t change) {
  for (const size_t type : {size_t{0}, is_small ? size_t{1} : size_t{2}}) {
    if (change >= 0) {
      stat[type].increase(static_cast<size_t>(change));
    } else {
      stat[type].decrease(static_cast<size_t>(-change));
    }
  }
}

// As CUDA's allocator does, of whole blocks.
void DeviceMemory::tell_profiler(char* address, int64_t bytes) {
  c10::reportMemoryUsageToProfiler(address, bytes, static_cast<size_t>(stats_.allocated_bytes[0].current),
                                   static_cast<size_t>(stats_.reserved_bytes[0].current), c10::Device(kSim, device_));
}

char* DeviceMemory::allocate(size_t bytes, StreamId stream) {
  const size_t rounded = round_up(std::max(bytes, size_t{1}), kBlockBytesMin);
  const bool is_small = rounded <= kSmallBytesMax;
  const std::lock_guard lock(mutex_);
  if (fails_in_ > 0 && --fails_in_ == 0) out_of_memory(bytes);
  settle();
  auto block = find_free(rounded, is_small, stream);
  if (block == blocks_.end()) block = new_segment(rounded, is_small, stream);
  if (block == blocks_.end()) {
    ++stats_.num_alloc_retries;
    release_segments();
    block = new_segment(rounded, is_small, stream);
  }
  if (block == blocks_.end()) out_of_memory(bytes);
  split(block, rounded);
  block->second.is_free = false;
  block->second.requested_bytes = bytes;
  poison(block->first, block->second.bytes, stream);
  const auto size = static_cast<int64_t>(block->second.bytes);
  count(stats_.allocation, is_small, 1);
  count(stats_.active, is_small, 1);
  count(stats_.allocated_bytes, is_small, size);
  count(stats_.active_bytes, is_small, size);
  count(stats_.requested_bytes, is_small, static_cast<int64_t>(bytes));
  tell_profiler(block->first, size);
  return block->first;
}

void DeviceMemory::out_of_memory(size_t bytes) {
  ++stats_.num_ooms;
  size_t free = 0, total = 0;
  sim_memory_info(device_, &free, &total);
  const auto reserved = static_cast<size_t>(stats_.reserved_bytes[0].current);
  const auto allocated = static_cast<size_t>(stats_.allocated_bytes[0].current);
  TORCH_CHECK_WITH(OutOfMemoryError, false, "sim out of memory. Tried to allocate ", in_mebibytes(bytes), ". Device ",
                   static_cast<int>(device_), " has a total capacity of ", in_mebibytes(total), " of which ",
                   in_mebibytes(free), " is free. ", in_mebibytes(allocated), " is allocated by PyTorch, and ",
                   in_mebibytes(reserved - allocated), " is reserved by PyTorch but unallocated.");
}

DeviceMemory::FreeKey DeviceMemory::key_of(const Blocks::iterator& block) const {
  const Block& about = block->second;
  return {about.stream, segments_.at(about.segment).is_small, about.bytes, block->first};
}

// The smallest that is large enough; taken off the free ones.
DeviceMemory::Blocks::iterator DeviceMemory::find_free(size_t bytes, bool is_small, StreamId stream) {
  const auto found = free_.lower_bound({stream, is_small, bytes, nullptr});
  if (found == free_.end() || std::get<0>(*found) != stream || std::get<1>(*found) != is_small) return blocks_.end();
  const auto block = blocks_.find(std::get<3>(*found));
  free_.erase(found);
  return block;
}

DeviceMemory::Blocks::iterator DeviceMemory::new_segment(size_t bytes, bool is_small, StreamId stream) {
  const size_t own = is_small                      ? kSmallSegmentBytes
                     : bytes < kOwnSegmentBytesMin ? kLargeSegmentBytes
                                                   : round_up(bytes, kSmallSegmentBytes);
  for (auto range = ranges_.begin(); range != ranges_.end(); ++range) {
    if (range->second < own) continue;
    if (!sim_reserve(device_, own)) break;
    const auto [address, room] = *range;
    ranges_.erase(range);
    if (room > own) ranges_[address + own] = room - own;
    segments_[address] = {own, is_small};
    count(stats_.segment, is_small, 1);
    count(stats_.reserved_bytes, is_small, static_cast<int64_t>(own));
    ++stats_.num_device_alloc;
    return blocks_.emplace(address, Block{own, 0, address, stream, true, {}}).first;
  }
  return blocks_.end();
}

// What is left of a block behind `bytes` is a free block of its own, if that is worth it.
void DeviceMemory::split(const Blocks::iterator& block, size_t bytes) {
  Block& whole = block->second;
  const size_t rest = whole.bytes - bytes;
  if (segments_.at(whole.segment).is_small ? rest < kBlockBytesMin : rest <= kSmallBytesMax) return;
  whole.bytes = bytes;
  const Block behind{rest, 0, whole.segment, whole.stream, true, {}};
  free_.insert(key_of(blocks_.emplace(block->first + bytes, behind).first));
}

void DeviceMemory::free(char* address) {
  const std::lock_guard lock(mutex_);
  const auto block = blocks_.find(address);
  TORCH_INTERNAL_ASSERT(block != blocks_.end() && !block->second.is_free);
  Block& gone = block->second;
  const bool is_small = segments_.at(gone.segment).is_small;
  count(stats_.allocation, is_small, -1);
  count(stats_.allocated_bytes, is_small, -static_cast<int64_t>(gone.bytes));
  count(stats_.requested_bytes, is_small, -static_cast<int64_t>(gone.requested_bytes));
  tell_profiler(address, -static_cast<int64_t>(gone.bytes));
  if (gone.used_by.empty()) return cache(block);
  Pending pending{block, {}};
  for (const StreamId id : gone.used_by) {
    pending.events.push_back(sim_event_create());
    const c10::Stream user(c10::Stream::UNSAFE, c10::Device(kSim, device_), id);
    sim_event_record(pending.events.back(), handle_of(user));
  }
  gone.used_by.clear();
  pending_.push_back(std::move(pending));
}

void DeviceMemory::use(char* address, StreamId stream) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(address);
  if (found != blocks_.end() && found->second.stream != stream) found->second.used_by.insert(stream);
}

// Caller holds the lock, here and below.
void DeviceMemory::settle() {
  for (auto each = pending_.begin(); each != pending_.end();) {
    const auto is_done = [](EventHandle event) { return sim_event_query(event) != 0; };
    if (!std::all_of(each->events.begin(), each->events.end(), is_done)) {
      ++each;
      continue;
    }
    for (const EventHandle event : each->events) sim_event_destroy(event);
    cache(each->block);
    each = pending_.erase(each);
  }
}

void DeviceMemory::cache(Blocks::iterator block) {
  Block& gone = block->second;
  const bool is_small = segments_.at(gone.segment).is_small;
  count(stats_.active, is_small, -1);
  count(stats_.active_bytes, is_small, -static_cast<int64_t>(gone.bytes));
  gone.is_free = true;
  const auto join = [&](Blocks::iterator first, Blocks::iterator second) {
    first->second.bytes += second->second.bytes;
    blocks_.erase(second);
    return first;
  };
  const auto is_mergeable = [&](const Blocks::iterator& other) {
    return other != blocks_.end() && other->second.is_free && other->second.segment == gone.segment;
  };
  if (const auto next = std::next(block); is_mergeable(next)) {
    free_.erase(key_of(next));
    block = join(block, next);
  }
  if (block != blocks_.begin() && is_mergeable(std::prev(block))) {
    const auto before = std::prev(block);
    free_.erase(key_of(before));
    block = join(before, block);
  }
  free_.insert(key_of(block));
}

// In the order of its stream, what was there is no more: whoever still reads it or writes to it is found out. Not when
// it is freed: what orders other streams' last uses with the next one may come between.
void DeviceMemory::poison(char* address, size_t bytes, StreamId id) {
  if (sim_failure() != nullptr) return;
  const c10::Stream stream(c10::Stream::UNSAFE, c10::Device(kSim, device_), id);
  sim_touch(handle_of(stream), address, bytes, 1, "the allocator");
  launch(stream, [=, view = sim_view(device_, address)] { std::memset(view, kPoison, bytes); });
}

void DeviceMemory::release_segments() {
  sim_synchronize(device_);
  settle();
  for (auto segment = segments_.begin(); segment != segments_.end();) {
    const auto [address, about] = *segment;
    const auto block = blocks_.find(address);
    if (!block->second.is_free || block->second.bytes < about.bytes) {
      ++segment;
      continue;
    }
    free_.erase(key_of(block));
    blocks_.erase(block);
    segment = segments_.erase(segment);
    count(stats_.segment, about.is_small, -1);
    count(stats_.reserved_bytes, about.is_small, -static_cast<int64_t>(about.bytes));
    ++stats_.num_device_free;
    sim_give_back(device_, address, about.bytes);
    auto range = ranges_.emplace(address, about.bytes).first;
    const auto next = std::next(range);
    if (next != ranges_.end() && range->first + range->second == next->first) {
      range->second += next->second;
      ranges_.erase(next);
    }
    if (range != ranges_.begin() && std::prev(range)->first + std::prev(range)->second == range->first) {
      std::prev(range)->second += range->second;
      ranges_.erase(range);
    }
  }
}

void DeviceMemory::release_cached() {
  const std::lock_guard lock(mutex_);
  release_segments();
}

c10::CachingDeviceAllocator::DeviceStats DeviceMemory::stats() {
  const std::lock_guard lock(mutex_);
  auto stats = stats_;
  for (const auto& [address, block] : blocks_) {
    const Segment& segment = segments_.at(block.segment);
    if (!block.is_free || block.bytes == segment.bytes) continue;
    count(stats.inactive_split, segment.is_small, 1);
    count(stats.inactive_split_bytes, segment.is_small, static_cast<int64_t>(block.bytes));
  }
  return stats;
}

void DeviceMemory::reset_peaks() {
  const std::lock_guard lock(mutex_);
  for (auto* stat : {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.allocated_bytes,
                     &stats_.reserved_bytes, &stats_.active_bytes, &stats_.requested_bytes})
    for (auto& each : *stat) each.reset_peak();
}

void DeviceMemory::fail_at(int nth) {
  const std::lock_guard lock(mutex_);
  fails_in_ = nth;
}

// -- the devices together, as torch asks for them ----------------------------------------------------------------------

namespace {

void give_back(void* address) {
  const LibraryTime time;
  if (address != nullptr) device_memory(static_cast<DeviceIndex>(sim_device_of(address))).free(static_cast<char*>(address));
}

}  // namespace

Allocator& allocator() {
  static auto* const allocator = new Allocator;
  return *allocator;
}

c10::DataPtr Allocator::allocate(size_t bytes) {
  const LibraryTime time;
  const c10::Stream stream = current_stream();
  if (bytes == 0) return {nullptr, nullptr, &give_back, stream.device()};
  char* const address = device_memory(stream.device_index()).allocate(bytes, stream.id());
  return {address, address, &give_back, stream.device()};
}

c10::DeleterFnPtr Allocator::raw_deleter() const { return &give_back; }

void Allocator::copy_data(void* to, const void* from, std::size_t bytes) const {
  const c10::Stream stream = current_stream(static_cast<DeviceIndex>(sim_device_of(to)));
  sim_touch(handle_of(stream), from, bytes, 0, "a copy of memory");
  sim_touch(handle_of(stream), to, bytes, 1, "a copy of memory");
  launch(stream, [=, to = sim_view(stream.device_index(), to), from = sim_view(sim_device_of(from), from)] {
    std::memmove(to, from, bytes);
  });
}

void Allocator::emptyCache(c10::MempoolId_t) {
  for (DeviceIndex device = 0; device < kDevices; ++device) device_memory(device).release_cached();
}

void Allocator::recordStream(const c10::DataPtr& data, c10::Stream stream) {
  if (data.get() != nullptr) device_memory(data.device().index()).use(static_cast<char*>(data.get_context()), stream.id());
}

c10::CachingDeviceAllocator::DeviceStats Allocator::getDeviceStats(DeviceIndex device) {
  return device_memory(device).stats();
}

void Allocator::resetPeakStats(DeviceIndex device) { device_memory(device).reset_peaks(); }

std::pair<size_t, size_t> Allocator::getMemoryInfo(DeviceIndex device) {
  size_t free = 0, total = 0;
  sim_memory_info(device < 0 ? current_device() : device, &free, &total);
  return {free, total};
}

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &allocator())

}  // namespace sim

#pragma GCC visibility push(default)
extern "C" void sim_fail_allocation(int device, int nth) { sim::device_memory(static_cast<c10::DeviceIndex>(device)).fail_at(nth); }
#pragma GCC visibility pop
