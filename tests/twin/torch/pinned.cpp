#include "pinned.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/Event.h>

#include <iterator>
#include <map>
#include <mutex>

namespace sim {
namespace {

std::mutex& mutex = *new std::mutex;
std::map<const char*, size_t>& pinned = *new std::map<const char*, size_t>;

struct Cache : at::CachingHostAllocatorImpl<c10::Stream, c10::Event> {
  void allocate_host_memory(size_t bytes, void** address) override {
    *address = sim_pin(bytes);
    TORCH_CHECK(*address != nullptr, "sim error: out of memory (", bytes, " bytes of pinned host memory)");
    const std::lock_guard lock(mutex);
    pinned[static_cast<char*>(*address)] = bytes;
  }
  void free_block(at::HostBlock<c10::Stream>* block) override {
    {
      const std::lock_guard lock(mutex);
      pinned.erase(static_cast<char*>(block->ptr_));
    }
    sim_unpin(block->ptr_, block->size_);
  }
  void record_stream(std::optional<std::vector<c10::Event>>& events, c10::Stream stream) override {
    c10::Event event(kSim);
    event.record(stream);
    events->push_back(std::move(event));
  }
  bool query_event(c10::Event& event) override { return event.query(); }
  c10::Stream get_current_stream() const override { return current_stream(); }
  bool stream_is_capturing(c10::Stream) const override { return false; }
};

void give_back_pinned(void* block);
using PinnedAllocator = at::CachingHostAllocatorInterface<Cache, give_back_pinned>;
PinnedAllocator& pinned_memory = *new PinnedAllocator;
void give_back_pinned(void* block) { pinned_memory.free(block); }

}  // namespace

bool is_pinned(const void* address) {
  const std::lock_guard lock(mutex);
  const auto next = pinned.upper_bound(static_cast<const char*>(address));
  if (next == pinned.begin()) return false;
  const auto& [base, bytes] = *std::prev(next);
  return address < base + bytes;
}

void hold_pinned(const at::TensorBase& host, c10::Stream stream) {
  const auto& data = host.storage().data_ptr();
  pinned_memory.record_event(data.get(), data.get_context(), stream);
}

c10::Allocator* pinned_allocator() {
  static const bool registered = [] {
    at::setHostAllocator(kSim, &pinned_memory);
    return true;
  }();
  static_cast<void>(registered);
  return &pinned_memory;
}

}  // namespace sim
