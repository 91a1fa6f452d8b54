// The store of swapped blocks: swap_out copies bytes out of device memory and returns a Ticket, which swaps them in.
//
// Two tiers implement the store. *slab* (slab_tier.h): device → pinned slab → disk. *direct* (direct_tier.h, host
// driver only): the aligned middle of a block is copied between its own memory and the file; its unaligned ends stay in
// RAM.
//
// Each ticket has a state machine, which ensures the order of its copies and of the computation around them:
//
//   slab tier     queued → copying_out → out → copying_in → arriving → ready → released
//                 with a spill: out → spilling → on_disk → filling → arriving
//   direct tier   queued → copying_out → on_disk → copying_in → ready → released
//                 a block without an aligned middle: queued → out → copying_in → ready
//
//   · a copy-out starts after the compute stream has produced the bytes;
//   · wait_out orders a compute stream after the copy-out: from then on the source may be overwritten or freed;
//   · a copy-in starts after its copy-out; if it reads from the file, it also starts after the write to the file;
//   · a copy-in starts after everything that was queued on the compute stream at prefetch: so a copy-in never
//     overwrites memory that this stream still uses;
//   · swap_in orders the compute stream after the copy-in;
//   · the pinned memory or file space of a swapped block is reused only after the last copy that uses it has ended.
//
// The last states differ by tier. Slab tier: in `arriving` the copy-in has been issued, and in_event completes when the
// target has all bytes; in `ready` swap_in has ordered the compute stream after in_event. Direct tier: there is no
// `arriving`; in `ready` the target has all bytes.
//
// Thread safety: every method may be called from any thread. A ticket may be prefetched again only after swap_in, or
// after its previous copy-in has ended (in_done, settle); either is enough. A Ticket may be destroyed at any time and
// in any state. Its destructor does not wait for copies; prefetch says how long the target must live.
//
// Errors: if the device fails, a method that uses it throws DriverError; id, bytes, state, failure_text, cancel and
// release never do. Other errors are listed with the method. After a failed copy-out the source is unchanged; after a
// failed copy-in the ticket can be prefetched again. If host memory runs out, swap_out and prefetch throw
// std::bad_alloc before anything has begun; release does not throw, but the pool or the file may then count the
// released block as used.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "copy_log.h"
#include "driver.h"
#include "event_pool.h"
#include "host_driver.h"
#include "slab_pool.h"
#include "spill_file.h"

namespace offload {

enum class State : uint8_t {
  queued,
  copying_out,
  out,
  spilling,
  on_disk,
  filling,
  copying_in,
  arriving,
  ready,
  cancelled,  // before the copy-out began: the source has the only copy of the bytes
  failed,     // the copy-out failed: the source has the only copy of the bytes
  released    // the ticket is gone; the slot is freed once no lane (a stream of the host driver) works on it
};

const char* state_name(State state);

constexpr size_t kSmallBytes = size_t{1} << 20;  // smaller blocks that are adjacent in a queue become one transfer

struct StoreOptions {
  size_t host_bytes_max = 0;              // limit on the slab tier's pinned memory
  size_t slab_bytes = size_t{256} << 20;  // size of a slab, which is pinned in one call
  // The queues copy a larger block in slices of this size; an urgent copy-in can start between two slices of another
  // one. Exceptions: the direct tier writes a block in one piece; the slab tier reads the file in slices of the size of
  // a bounce buffer; an urgent copy-in from the slab copies the rest of its block in one piece.
  size_t slice_bytes = size_t{32} << 20;
  std::string spill_directory;  // empty: the slab tier has no file; the direct tier needs one
  bool checks_every_byte = false;  // of what is read from the file; else two cache lines of each block (checksum.h)
};

struct StoreStats {
  uint64_t out_bytes = 0, in_bytes = 0;
  uint64_t out_copies = 0, in_copies = 0;  // numbers of blocks; direct tier: of blocks that have bytes in the file
  // A slice of a large block counts as one transfer; so does a batch of small blocks. The direct tier writes a large
  // block in one transfer.
  uint64_t out_transfers = 0, in_transfers = 0;
  // Time during which copies ran. The direct tier includes copies that failed or whose ticket was released meanwhile.
  double out_seconds = 0, in_seconds = 0;
  double stall_seconds = 0;    // time that callers spent in wait_out and swap_in
  uint64_t spilled_bytes = 0;  // written to disk
  uint64_t cancelled = 0, failed = 0;
  uint64_t live_tickets = 0;  // number of slots that are not freed yet
  PoolStats pool;
  SpillStats spill;
};

// One swapped block. Each tier has a derived class.
struct Slot {
  virtual ~Slot() = default;
  uint64_t id = 0;
  size_t bytes = 0;
  uint64_t need = 0;  // larger if backward needs the block later; blocks with the largest value are spilled first
  std::atomic<State> state{State::queued};
  EventRef out_event;  // completes when the source is no longer read
  EventRef in_event;   // completes when the target has all bytes
  std::exception_ptr failure;
  const void* source = nullptr;
  void* target = nullptr;
  std::shared_ptr<void> target_owner;
};
using SlotRef = std::shared_ptr<Slot>;

// Changes a slot's state; throws std::logic_error if the state machine has no such transition. Caller holds the store's
// lock.
void advance(Slot& slot, State to);

class SwapStore;

// Handle of one swapped block. Movable, not copyable.
class Ticket {
 public:
  Ticket() = default;  // empty; only for assigning another ticket to it
  Ticket(std::shared_ptr<SwapStore> store, SlotRef slot) : store_(std::move(store)), slot_(std::move(slot)) {}
  Ticket(Ticket&&) = default;
  Ticket& operator=(Ticket&& other) noexcept;
  ~Ticket() { release(); }

  uint64_t id() const { return slot_->id; }  // unique within its store
  size_t bytes() const { return slot_->bytes; }
  State state() const { return slot_->state.load(); }
  // The error of the last failed copy; empty if none failed since the latest prefetch.
  std::string failure_text() const;
  // Returns whether the source is no longer read; true also after a failure.
  bool out_done();
  // Orders `compute` after the copy-out. On the host driver this blocks.
  void wait_out(Stream compute);
  // Cancels a copy-out that has not begun. Returns false if it has.
  bool cancel();
  // Queues the copy-in to `target`, which has `bytes` bytes. In the direct tier its address must be congruent to the
  // source's modulo alignment_bytes. The direct tier holds `owner` until the copy has ended. The slab tier drops it
  // when the ticket is prefetched again or destroyed, whether or not the copy has ended. So before that, the caller
  // must call settle() or wait until in_done() returns true; otherwise it must keep the target alive by a reference of
  // its own. Throws std::logic_error if nothing was swapped out, or in the states `filling` and `copying_in`.
  void prefetch(void* target, Stream compute, std::shared_ptr<void> owner);
  // Returns whether no copy-in writes to the target any more; true also after a failure.
  bool in_done();
  // Orders `compute` after the copy-in. Makes the copy-in overtake queued copy-ins for which no caller waits. If the
  // copy-in failed, throws its error (such as SpillError); the ticket can then be prefetched again. Throws
  // std::logic_error if nothing was prefetched.
  void swap_in(Stream compute);
  // Waits until no copy-in writes to the target any more. Does not throw the copy-in's error.
  void settle();
  void release() noexcept;

 private:
  std::shared_ptr<SwapStore> store_;
  SlotRef slot_;
};

class SwapStore : public std::enable_shared_from_this<SwapStore> {
 public:
  // `device`: driver of the device, for the slab tier. `lanes`: host driver whose streams ("lanes") run file I/O and, in
  // the slab tier, also issue device copies; in the direct tier it is the driver of the device too. Throws SpillError,
  // PoolExhausted (no room for the bounce buffers), DriverError, std::invalid_argument.
  static std::shared_ptr<SwapStore> create_direct(std::shared_ptr<HostDriver> lanes, const StoreOptions& options);
  static std::shared_ptr<SwapStore> create_slab(std::shared_ptr<Driver> device, std::shared_ptr<HostDriver> lanes,
                                                const StoreOptions& options);
  virtual ~SwapStore() = default;

  // Queues the copy-out of `bytes` bytes at `source`, after everything queued on `compute`. `need`: see Slot. The
  // source must stay unchanged until out_done() or wait_out(). If this throws (PoolExhausted, PinningFailed,
  // DriverError), nothing is queued. If another block cannot be written to the file to make room, that block stays in
  // memory, and its error is counted, not thrown. A small block may wait in the queue, to be copied together with
  // others; if that copy cannot be issued, the block's state becomes `failed`.
  Ticket swap_out(const void* source, size_t bytes, Stream compute, uint64_t need);
  // With `defers`, the direct tier queues copy-outs without beginning them. All of them begin when a caller waits for
  // one, or when `defers` is set to false. The slab tier ignores this.
  virtual void defer_copy_outs(bool /*defers*/) {}
  // Cancels queued copy-outs and waits for all other copies; afterwards no copy touches a caller's memory.
  virtual void quiesce() = 0;
  // Frees empty slabs and truncates the unused end of the spill file. Returns the bytes freed.
  virtual size_t trim() = 0;
  // Frees empty slabs, as long as the others hold at least `keep_bytes`. Returns the bytes freed.
  virtual size_t trim_pool(size_t /*keep_bytes*/) { return 0; }
  // The pool's high-water mark counts from here on. The direct tier has no pool.
  virtual void restart_high_water() {}
  virtual StoreStats stats() = 0;
  // Starts to record the begin and end of copies; the newest `limit` are kept. 0 stops and clears the record. In the
  // record, "out" and "in" are copies from and to the device, "spill" and "fill" are copies from slab to file and back.
  void record_copies(size_t limit);
  // Returns the records of the copies that have ended, each once. If their times cannot be read, throws and keeps the
  // records for the next call. About every 10 seconds, this method also measures the device's clock again (Anchor). If
  // this measurement fails, throws, and the records that this call would have returned are lost.
  std::vector<CopyEntry> take_copies();
  // Returns true if swap_out never waits, and prefetch waits for nothing but the end of the copy-out.
  virtual bool only_queues() const { return false; }
  // Returns the alignment modulo which a target's address must be congruent to its source's; 1 allows any address.
  virtual size_t alignment_bytes() const = 0;
  virtual SpillFile* spill_file() = 0;
  void require_same_process() const { lanes_->require_same_process(); }

 protected:
  friend class Ticket;
  SwapStore(std::shared_ptr<Driver> device, std::shared_ptr<HostDriver> lanes)
      : device_(std::move(device)),
        lanes_(std::move(lanes)),
        events_(std::make_shared<EventPool>(device_)),
        lane_events_(lanes_ == device_ ? events_ : std::make_shared<EventPool>(lanes_)),
        log_(device_) {}

  virtual SlotRef queue_copy_out(const void* source, size_t bytes, Stream compute, uint64_t need) = 0;
  virtual bool out_done(Slot& slot) = 0;
  // Issues the copy-out, so that out_event can be waited for.
  virtual void issue_out(Slot&) {}
  virtual bool cancel(Slot& slot) = 0;
  virtual void prefetch(const SlotRef& slot, void* target, Stream compute, std::shared_ptr<void> owner) = 0;
  virtual void swap_in(const SlotRef& slot, Stream compute) = 0;
  virtual void settle(const SlotRef& slot) = 0;
  virtual void release(const SlotRef& slot) = 0;
  void add_stall(double seconds);
  // Throws as Ticket::prefetch does. Caller holds mutex_.
  static void require_prefetchable(const Slot& slot);
  // Sets the target of the copy-in. Leaves the previous owner in `owner`, to be destroyed without the lock.
  static void set_target(Slot& slot, void* target, std::shared_ptr<void>& owner);
  // Throws the copy-in's error, or std::logic_error if nothing was prefetched. Caller holds mutex_.
  static void require_swapped_in(const Slot& slot);

  const std::shared_ptr<Driver> device_;
  const std::shared_ptr<HostDriver> lanes_;
  const std::shared_ptr<EventPool> events_;
  const std::shared_ptr<EventPool> lane_events_;
  std::mutex mutex_;  // guards every slot, the statistics and the log
  StoreStats stats_;
  CopyLog log_;
  std::atomic<uint64_t> last_id_{0};
};

}  // namespace offload
