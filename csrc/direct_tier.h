// The direct tier's store: blocks of plain RAM ↔ the spill file, without a buffer in between.
//
// direct_tier.cpp has the copy-outs and the slots, direct_swap_in.cpp the copy-ins; each direction has a lane (a stream
// of the host driver). The out lane writes the queued blocks in order. The in lane first reads the blocks for which a
// caller waits. Both lanes join adjacent small blocks of their queue into one transfer. A lane has at most one task,
// which queues the next one when it ends, so that callers rarely have to wake the lane's thread.
//
// If a lane task gets std::bad_alloc, only the blocks of that task fail; lane tasks never throw.
#pragma once

#include <algorithm>
#include <deque>
#include <memory>
#include <vector>

#include "swap_store.h"

namespace offload {

struct DirectSlot final : Slot {
  size_t head_bytes = 0;    // bytes before the first aligned address
  size_t middle_bytes = 0;  // bytes that go to disk
  std::vector<char> ends;   // the bytes of the head, then those of the tail
  Extent extent;
  uint32_t crc_out = 0;
  uint32_t crc_in = 0;
  size_t middle_done = 0;  // bytes read by the current copy-in
  bool busy = false;       // the in lane is reading it
  bool urgent = false;     // a caller waits for it
  bool deferred = false;   // its copy-out does not begin yet
  double in_began_seconds = 0;
};

class DirectStore final : public SwapStore {
 public:
  DirectStore(std::shared_ptr<HostDriver> lanes, const StoreOptions& options)
      : SwapStore(lanes, lanes),
        slice_bytes_(options.slice_bytes),
        file_(options.spill_directory, options.checks_every_byte),
        out_lane_(*lanes),
        in_lane_(*lanes) {}

  SlotRef queue_copy_out(const void* source, size_t bytes, Stream, uint64_t need) override;
  bool out_done(Slot& slot) override { return slot.state != State::queued && slot.state != State::copying_out; }
  void defer_copy_outs(bool defers) override;
  void issue_out(Slot& slot) override;
  bool cancel(Slot& slot) override;
  void prefetch(const SlotRef& slot, void* target, Stream, std::shared_ptr<void> owner) override;
  void swap_in(const SlotRef& slot, Stream) override;
  void settle(const SlotRef& slot) override;
  void release(const SlotRef& slot) override;
  void quiesce() override;
  size_t trim() override;
  StoreStats stats() override;
  bool only_queues() const override { return true; }
  size_t alignment_bytes() const override { return file_.alignment_bytes(); }
  SpillFile* spill_file() override { return &file_; }

 private:
  using Ref = std::shared_ptr<DirectSlot>;
  using Refs = std::vector<Ref>;
  using Queue = std::deque<Ref>;

  Refs small_run(Queue::const_iterator first, Queue::const_iterator end) const;
  void begin_writing();
  void issue_deferred();
  void write_out();
  void write_next();
  void write_large(DirectSlot& slot);
  void write_small(const Refs& slots);
  void end_out(DirectSlot& slot, const Extent& extent, uint32_t crc, std::exception_ptr failure, double begin_seconds);
  void cancel_queued(const Ref& slot);
  void begin_reading();
  void read();
  void read_next();
  void read_slice(DirectSlot& slot);
  void read_small(const Refs& slots);
  void end_slice(DirectSlot& slot, size_t bytes, std::exception_ptr failure);
  void end_in(DirectSlot& slot, State state);
  bool is_small(const DirectSlot& slot) const { return slot.middle_bytes < std::min(kSmallBytes, slice_bytes_); }
  static char* target_middle(const DirectSlot& slot) { return static_cast<char*>(slot.target) + slot.head_bytes; }
  void free_slot(DirectSlot& slot);
  static void save_ends(DirectSlot& slot);
  static void restore_ends(const DirectSlot& slot);

  const size_t slice_bytes_;
  SpillFile file_;
  Queue outgoing_;  // copy-outs that have not begun
  bool defers_ = false;
  bool is_writing_ = false;  // the out lane has a task
  Queue incoming_;           // copy-ins that have not finished
  bool is_reading_ = false;  // the in lane has a task
  // Last, so that they are destroyed first. No task is left by then, because every task on a lane holds a reference to
  // the store.
  const OwnedStream out_lane_;
  const OwnedStream in_lane_;
};

}  // namespace offload
