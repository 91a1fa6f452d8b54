#include "copy_out_queue.h"

#include <algorithm>
#include <new>

#include "mutants.h"

namespace offload {

void CopyOutQueue::push(const SlabRef& slot) {
  slot->produced = parts_.events->record(slot->compute);
  if (parts_.is_small(*slot) && !feed_queued_) {
    parts_.lanes->call(lane_, [this, store = parts_.keep()] { feed(); });
    feed_queued_ = true;
  }
  slots_.push_back(slot);
  if (!parts_.is_small(*slot)) issue();
}

void CopyOutQueue::feed() {
  std::unique_lock lock(parts_.mutex);
  feed_queued_ = false;
  for (;;) {
    in_flight_.await_room(lock);
    if (slots_.empty()) return;
    issue_next();
    in_flight_.note(parts_.out_stream);
  }
}

void CopyOutQueue::issue() {
  while (!slots_.empty()) issue_next();
}

void CopyOutQueue::issue(const SlabSlot& slot) {
  while (slot.state == State::queued && !slots_.empty()) issue_next();
}

void CopyOutQueue::issue_next() {
  const SlabRef first = slots_.front();
  const SlabRefs run = next_run();
  const size_t count = std::max<size_t>(run.size(), 1);
  slots_.erase(slots_.begin(), slots_.begin() + static_cast<std::ptrdiff_t>(count));
  issue_run(run.empty() ? &first : run.data(), count);
}

// Returns the small blocks at the front of the queue that the device has produced, of at most slice_bytes in total;
// fewer if memory runs out. Empty if the first block is large or not produced.
SlabRefs CopyOutQueue::next_run() {
  SlabRefs run;
  size_t run_bytes = 0;
  for (const SlabRef& slot : slots_) {
    run_bytes += slot->bytes;
    if (!parts_.is_small(*slot) || run_bytes > parts_.slice_bytes) break;
    if (!OFFLOAD_BROKEN("a batch has only produced blocks") && !parts_.is_reached(slot->produced)) break;
    try {
      run.push_back(slot);
    } catch (const std::bad_alloc&) {
      break;
    }
  }
  return run;
}

// Issues one transfer. If that fails, each of its blocks is tried alone, so that each has its own result.
void CopyOutQueue::issue_run(const SlabRef* slots, size_t count) {
  try {
    copy(slots, count);
  } catch (...) {
    const std::exception_ptr failure = std::current_exception();
    const bool settled = parts_.settle(parts_.out_stream);  // part of it may have been issued
    if (count > 1) {
      for (size_t each = 0; each < count; ++each) issue_run(slots + each, 1);
    } else {
      SlabSlot& slot = **slots;
      slot.failure = failure;
      if (!settled) slot.block = {};  // leaked: a copy may still write to it
      fail(slot);
    }
    return;
  }
  for (const SlabRef* slot = slots; slot != slots + count; ++slot) {
    advance(**slot, State::copying_out);
    parts_.log.add(CopyKind::out, (*slot)->id, (*slot)->bytes, (*slot)->out->begin, (*slot)->out->end);
    spiller_.offer(*slot);
  }
}

void CopyOutQueue::copy(const SlabRef* slots, size_t count) {
  if (count == 1)  // a batch has only blocks that the device has already produced (next_run)
    OFFLOAD_EDGE("copy-out waits for compute",
                 parts_.device->stream_wait(parts_.out_stream, slots[0]->produced.get()));
  auto transfer = std::make_shared<Transfer>();
  transfer->begin = parts_.events->record(parts_.out_stream);
  std::vector<Copy> copies;
  for (size_t each = 0; each < count; ++each) {
    const SlabSlot& slot = *slots[each];
    for (size_t at = 0; at < slot.bytes; at += parts_.slice_bytes)
      copies.push_back({slot.block.data + at, static_cast<const char*>(slot.source) + at,
                        std::min(parts_.slice_bytes, slot.bytes - at)});
  }
  if (count > 1) {
    parts_.device->copy_out_batch(copies.data(), copies.size(), parts_.out_stream);
  } else {
    for (const Copy& copy : copies) parts_.device->copy_out(copy.to, copy.from, copy.bytes, parts_.out_stream);
  }
  transfer->end = parts_.events->record(parts_.out_stream);
  parts_.stats.out_transfers += count > 1 ? 1 : copies.size();
  for (size_t each = 0; each < count; ++each) {
    slots[each]->produced = nullptr;
    slots[each]->out = transfer;
    slots[each]->out_event = transfer->end;
  }
}

void CopyOutQueue::fail(SlabSlot& slot) {
  if (slot.block) parts_.pool.release(slot.block, nullptr);
  slot.block = {};
  slot.produced = nullptr;
  ++parts_.stats.failed;
  advance(slot, State::failed);
}

void CopyOutQueue::cancel(SlabSlot& slot) {
  slots_.erase(std::remove_if(slots_.begin(), slots_.end(), [&](const SlabRef& each) { return each.get() == &slot; }),
               slots_.end());
  parts_.pool.release(slot.block, nullptr);
  slot.block = {};
  slot.produced = nullptr;
  ++parts_.stats.cancelled;
  advance(slot, State::cancelled);
}

void CopyOutQueue::cancel_all() {
  while (!slots_.empty()) {
    const SlabRef slot = slots_.front();
    cancel(*slot);
  }
}

}  // namespace offload
