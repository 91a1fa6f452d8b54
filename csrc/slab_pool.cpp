#include "slab_pool.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <thread>

#include "error.h"
#include "huge_pages.h"
#include "mutants.h"
#include "numa.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace offload {
namespace {

constexpr std::chrono::seconds kRefusalHolds{60};  // pinning is tried again after this time: memory may be free then

constexpr size_t kPopulatorsMax = 4;

void populate(char* data, size_t bytes) {
  if (madvise(data, bytes, MADV_POPULATE_WRITE) == 0) return;
  for (size_t at = 0; at < bytes; at += kPageBytes) static_cast<volatile char*>(data)[at] = 0;  // Linux before 5.14
}

}  // namespace

char* map_pages(size_t bytes, int node) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED && OFFLOAD_BROKEN("a failed allocation raises an out-of-memory error"))
    throw std::logic_error("no memory");
  if (address == MAP_FAILED) throw std::bad_alloc();
  char* data = static_cast<char*>(address);
  if (OFFLOAD_BROKEN("slabs are not locked with mlock") && mlock(data, bytes) != 0) throw std::bad_alloc();
  prefer_numa_node(data, bytes, node);
  ask_for_huge_pages(data, bytes);
  const size_t parts = std::clamp<size_t>(std::thread::hardware_concurrency(), 1, kPopulatorsMax);
  const size_t part_bytes = (bytes / parts + kPageBytes - 1) / kPageBytes * kPageBytes;
  std::array<std::thread, kPopulatorsMax> threads;
  auto next = threads.begin();
  for (size_t at = part_bytes; at < bytes; at += part_bytes) {
    try {
      *next = std::thread(populate, data + at, std::min(part_bytes, bytes - at));
      ++next;
    } catch (const std::exception&) {  // no further thread can be started
      if (OFFLOAD_BROKEN("a thread that cannot start is not needed")) throw std::bad_alloc();
      populate(data + at, std::min(part_bytes, bytes - at));
    }
  }
  populate(data, std::min(part_bytes, bytes));
  std::for_each(threads.begin(), next, [](std::thread& thread) { thread.join(); });
  return data;
}

void unmap_pages(char* data, size_t bytes) noexcept {
#ifdef OFFLOAD_MUTANTS
  madvise(data, bytes, MADV_DONTNEED);  // so that a late copy is detected and does not crash
#else
  munmap(data, bytes);
#endif
}

SlabPool::SlabPool(std::shared_ptr<Driver> driver, size_t max_bytes, size_t slab_bytes)
    : driver_(std::move(driver)),
      max_bytes_(max_bytes / kPageBytes * kPageBytes),
      slab_bytes_(slab_bytes),
      numa_node_(driver_->numa_node()) {
  stats_.max_bytes = max_bytes_;
}

SlabPool::~SlabPool() {
  try {
    for (const Fenced& entry : fenced_)
      if (!driver_->in_forked_child()) driver_->event_synchronize(entry.fence.get());
  } catch (const DriverError&) {
    return;  // the context is lost: copies may still use the slabs, so they are leaked
  }
  for (const Slab& slab : slabs_) {
    if (slab.data == nullptr) continue;
    if (driver_->host_unregister(slab.data)) unmap_pages(slab.data, slab.bytes);  // else it is leaked, still pinned
  }
}

std::optional<Block> SlabPool::try_allocate(size_t bytes) {
  sweep();
  std::optional<Block> block = take(bytes);
  if (!block && grow(bytes)) block = take(bytes);
  return block;
}

std::optional<Block> SlabPool::take(size_t bytes) {
  Slab* best = nullptr;
  for (Slab& slab : slabs_) {
    const uint64_t largest = slab.free.largest_free_bytes();
    if (largest < slab.free.round_up(std::max<size_t>(bytes, 1))) continue;
    if (best == nullptr || slab.free.free_bytes() < best->free.free_bytes()) best = &slab;
  }
  if (best == nullptr) return std::nullopt;
  const auto offset = best->free.allocate(bytes);
  stats_.used_bytes += best->free.round_up(std::max<size_t>(bytes, 1));
  stats_.requested_bytes += bytes;
  stats_.high_water_bytes = std::max(stats_.high_water_bytes, stats_.used_bytes);
  return Block{best->data + *offset, bytes, static_cast<size_t>(best - slabs_.data())};
}

bool SlabPool::grow(size_t bytes) {
  const size_t wanted = (std::max<size_t>(bytes, 1) + kPageBytes - 1) / kPageBytes * kPageBytes;
  const size_t room = max_bytes_ - stats_.held_bytes;
  if (wanted > room) {
    drop_empty_slabs(0);
    if (wanted > max_bytes_ - stats_.held_bytes) return false;
  }
  const size_t slab_bytes = std::max(wanted, std::min(slab_bytes_, max_bytes_ - stats_.held_bytes));
  const auto begin = std::chrono::steady_clock::now();
  const bool refused = refusal_ && slab_bytes >= refused_bytes_ && begin < asked_again_at_;
  if (refused && !OFFLOAD_BROKEN("a refused pinning is not tried again")) throw PinningFailed(*refusal_);
  Slab& slab = empty_slab();  // allocated first: after pinning, nothing may throw
  ExtentMap all{kPageBytes};
  all.grow(0, slab_bytes);
  char* data = map_pages(slab_bytes, numa_node_);
  try {
    driver_->host_register(data, slab_bytes);
  } catch (const DriverError& error) {
    unmap_pages(data, slab_bytes);
    refusal_.emplace(error);
    refused_bytes_ = slab_bytes;
    asked_again_at_ = begin + kRefusalHolds;
    OFFLOAD_EDGE("a slab that cannot be pinned is refused", throw PinningFailed(error));
  } catch (...) {
    unmap_pages(data, slab_bytes);
    throw;
  }
  stats_.registration_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  stats_.held_bytes += slab_bytes;
  slab.data = data;
  slab.bytes = slab_bytes;
  slab.free = std::move(all);
  return true;
}

SlabPool::Slab& SlabPool::empty_slab() {
  auto slab = std::find_if(slabs_.begin(), slabs_.end(), [](const Slab& each) { return each.data == nullptr; });
  return slab == slabs_.end() ? slabs_.emplace_back() : *slab;
}

void SlabPool::release(const Block& block, EventRef fence) {
  try {
    if (fence != nullptr && !OFFLOAD_BROKEN("slot waits for its last read")) {  // sweep() checks the fence
      fenced_.push_back({block, std::move(fence)});
    } else {
      give_back(block);
    }
  } catch (const std::bad_alloc&) {
    // There is no memory to record the release: the block stays counted as used.
  }
}

void SlabPool::give_back(const Block& block) {
  Slab& slab = slabs_[block.slab];
#ifdef OFFLOAD_MUTANTS
  std::memset(block.data, mutants::kPoison, block.bytes);
#endif
  slab.free.release(static_cast<uint64_t>(block.data - slab.data), block.bytes);
  stats_.used_bytes -= slab.free.round_up(std::max<size_t>(block.bytes, 1));
  stats_.requested_bytes -= block.bytes;
}

// Frees the fenced blocks whose event is done. If the driver fails, they stay fenced.
void SlabPool::sweep() {
  for (auto entry = fenced_.begin(); entry != fenced_.end();) {
    if (driver_->event_done(entry->fence.get())) {
      give_back(entry->block);
      entry = fenced_.erase(entry);
    } else {
      ++entry;
    }
  }
}

EventRef SlabPool::oldest_fence() const { return fenced_.empty() ? nullptr : fenced_.front().fence; }

size_t SlabPool::trim(size_t keep_bytes) {
  refusal_.reset();
  return drop_empty_slabs(keep_bytes);
}

size_t SlabPool::drop_empty_slabs(size_t keep_bytes) {
  sweep();
  size_t given_back = 0;
  for (Slab& slab : slabs_) {
    if (slab.data == nullptr || slab.free.free_bytes() < slab.bytes) continue;
    if (stats_.held_bytes - given_back - slab.bytes < keep_bytes) continue;
    if (driver_->host_unregister(slab.data)) unmap_pages(slab.data, slab.bytes);  // else it is leaked, still pinned
    given_back += slab.bytes;
    slab = Slab{};
  }
  stats_.held_bytes -= given_back;
  if (given_back > 0) refusal_.reset();
  return given_back;
}

size_t SlabPool::free_bytes() const { return max_bytes_ - stats_.used_bytes; }

size_t SlabPool::largest_slab_bytes() const {
  size_t largest = 0;
  for (const Slab& slab : slabs_) largest = std::max(largest, slab.bytes);
  return largest;
}

PoolStats SlabPool::stats() {
  sweep();
  return stats_;
}

}  // namespace offload
