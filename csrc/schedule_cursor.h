// The position of a step in its schedule. It is written for the hooks of kept tensors: most hooks are of this kind, and
// if little is swapped, they cause most of the cost of offload.
//
// hook_core.cpp uses it at every pack and unpack. Releases and prefetches that are due at a kept tensor's hook are
// executed by Python (executor.py), which uses the same cursor; those due at a swapped tensor's hook by swap_hooks.cpp,
// unless Python handles this tensor. This file uses no Python. Not thread safe: callers hold the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gauge.h"
#include "node_clock.h"

namespace offload {

// A number of tensors and their total bytes.
struct Count {
  int64_t tensors = 0;
  int64_t nbytes = 0;
  int64_t tensors_before = 0, nbytes_before = 0;  // the values when the last step began
};

// The schedule's entry for one pack. A value of -1 means none.
struct PackRow {
  int64_t kept_bytes = -1;     // a tensor of exactly this size is kept
  bool is_kept_again = false;  // kept, whatever its size: a further view of a storage that is kept and counted already
  int64_t node_after = -1;     // the node that starts after this pack; only with a plan
  int64_t weighed = -1;        // at this pack, activations are measured for this node
  int64_t watched = -1;        // the node that starts with the unpack of this tensor
  bool is_swapped = false;     // the tensor, or another view of its storage, is swapped or dropped
  int64_t swapped_bytes = -1;  // a storage of exactly this size is swapped
  uint64_t need = 0;           // spill priority of that storage: larger if backward needs it later
  int64_t first = -1;          // the pack that saved the storage of this tensor first
  bool is_recorded = false;    // Python handles the pack: operators are recorded around it, or a recipe reads the tensor
};

// A copy that is due at a node, for the storage of a pack.
struct DueCopy {
  int64_t node;
  int64_t use;  // of a prefetch: the node that needs the storage
  int64_t pack_index;
};

// A schedule compiled to rows by pack index. Once it is filled, only what is known of small tensors changes.
class PackTable {
 public:
  // Returns the row of a pack; creates it if it does not exist.
  PackRow& at(size_t pack_index);
  const PackRow* find(int64_t pack_index) const {
    return pack_index >= 0 && static_cast<size_t>(pack_index) < rows_.size() ? &rows_[static_cast<size_t>(pack_index)]
                                                                             : nullptr;
  }

  // Whether the last small tensor at this pack that owned its memory had this size.
  bool is_small(int64_t pack_index, int64_t nbytes) const;
  // Stores the size of a small tensor that owns its memory.
  void add_small(int64_t pack_index, int64_t nbytes);

  std::vector<DueCopy> releases, prefetches;  // in order
  bool waits_for_prefetches = false;          // the step waits for its prefetches, so nothing is computed meanwhile

 private:
  std::vector<PackRow> rows_;
  std::vector<int64_t> small_bytes_;  // by pack index; -1: none
};

// Bytes by node. The steps that follow one schedule share it.
struct NodeBytes {
  explicit NodeBytes(std::vector<int64_t> bytes) : by_node(std::move(bytes)) {}
  const std::vector<int64_t> by_node;
};

// Measures the peak of the activations in memory during a step.
class ActivationMeter {
 public:
  // `kept`: bytes that the schedule keeps, by node. `resident`: bytes that the engine has on the device. `steps`:
  // number of steps begun. If another step begins before this one ends, their bytes cannot be separated, so neither of
  // them is measured.
  ActivationMeter(std::shared_ptr<const NodeBytes> kept, std::shared_ptr<const Gauge> resident,
                  std::shared_ptr<const Gauge> steps, bool on)
      : is_on(on), kept_(std::move(kept)), resident_(std::move(resident)), steps_(std::move(steps)), step_(steps_->now) {}

  // Measures at `node`; does nothing if it is -1. `more_bytes`: bytes that are about to be swapped in.
  void weigh(int64_t node, int64_t more_bytes);

  bool is_on;
  int64_t stayed_bytes = 0;  // bytes of tensors that the schedule swaps but that were kept
  int64_t peak_bytes = 0;

 private:
  const std::shared_ptr<const NodeBytes> kept_;
  const std::shared_ptr<const Gauge> resident_;
  const std::shared_ptr<const Gauge> steps_;
  const int64_t step_;
};

class ScheduleCursor {
 public:
  // The result of `ask`.
  // quiet: no release or prefetch is due. due: one is due. unwatched: this unpack is not part of the schedule. back: it
  // starts a node before the current one.
  enum class Ask : uint8_t { quiet, due, unwatched, back };
  // The result of `pack`. undecided: the cursor cannot decide; other code does. kept: the tensor is kept, and nothing
  // else has to be done. due: the tensor is kept, and Python has to execute the releases and prefetches that are due.
  enum class Verdict : uint8_t { undecided, kept, due };

  ScheduleCursor(std::shared_ptr<PackTable> table, std::shared_ptr<NodeClock> clock,
                 std::shared_ptr<ActivationMeter> meter)
      : table_(std::move(table)), clock_(std::move(clock)), meter_(std::move(meter)) {}

  // Advances to the node that starts after this pack, if the schedule keeps a tensor of this size.
  Verdict pack(int64_t pack_index, int64_t nbytes);
  // Whether the pack is that of a small tensor which owns its memory, as far as its size tells.
  bool is_small(int64_t pack_index, int64_t nbytes) const {
    return is_on_schedule && table_->is_small(pack_index, nbytes);
  }
  // Stores the size of a small tensor that owns its memory, for the steps that follow.
  void add_small(int64_t pack_index, int64_t nbytes) {
    if (is_on_schedule) table_->add_small(pack_index, nbytes);
  }
  // Whether a kept pack is a further view of a storage that is counted already.
  bool keeps_again(int64_t pack_index) const { return row(pack_index) != nullptr && row(pack_index)->is_kept_again; }
  // Advances to the node that starts with the unpack of a kept tensor. Returns false, with nothing changed, if Python
  // has to do it.
  bool unpack(int64_t pack_index);
  // Whether the unpack of a kept tensor starts a node.
  bool watches(int64_t pack_index) const { return row(pack_index) != nullptr && row(pack_index)->watched >= 0; }
  // Advances to a node. Returns whether a release or a prefetch is due there.
  bool arrive(int64_t next_node);
  // Advances to the node that starts with the unpack of any tensor, if it is not before the current node.
  Ask ask(int64_t pack_index);
  // Returns the row of a pack; null if the schedule has none, or if the step differs from the recorded one.
  const PackRow* find(int64_t pack_index) const { return row(pack_index); }
  const PackTable& table() const { return *table_; }
  NodeClock* clock() const { return clock_.get(); }
  ActivationMeter* meter() const { return meter_.get(); }
  bool has_used(int64_t pack_index) const;
  void forget_uses() { used_.clear(); }

  int64_t node = 0;
  int64_t next_due = 0;        // the node at which the next release, prefetch or call (StepCopies::call_at) is due
  bool is_on_schedule = true;  // so far the step does the same as the recorded one

 private:
  bool is_due(int64_t next_node) const;
  void use(int64_t pack_index);
  const PackRow* row(int64_t pack_index) const { return is_on_schedule ? table_->find(pack_index) : nullptr; }

  const std::shared_ptr<PackTable> table_;
  const std::shared_ptr<NodeClock> clock_;
  const std::shared_ptr<ActivationMeter> meter_;
  std::vector<bool> used_;  // by pack index
};

}  // namespace offload
