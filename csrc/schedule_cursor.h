// The position of a step in its schedule, as the hooks of kept tensors need it. They are most of the hooks, and if
// little is swapped, most of the cost of offload.
//
// hook_core.cpp uses it at every pack and unpack. Python (executor.py) runs what is due at a node and handles swapped
// tensors; it uses the same cursor. This file uses no Python. Not thread safe: callers hold the GIL.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "gauge.h"
#include "node_clock.h"

namespace offload {

// So many tensors, of so many bytes in all.
struct Count {
  int64_t tensors = 0;
  int64_t nbytes = 0;
};

// What a schedule says of one pack. -1: nothing.
struct PackRow {
  int64_t kept_bytes = -1;   // a tensor of just this size stays, without a second look
  bool is_kept_again = false;  // or one of any size, on a storage that stays and is counted already
  int64_t node_after = -1;   // the node that begins with this pack
  int64_t weighed = -1;      // the node at which activations are weighed then
  int64_t watched = -1;      // the node that its unpack begins
  bool is_swapped = false;   // or shows the storage of one that is
};

// A schedule compiled to rows by pack index. Immutable once it is filled.
class PackTable {
 public:
  // The row of a pack, made where there is none.
  PackRow& at(size_t pack_index);
  const PackRow* find(int64_t pack_index) const {
    return pack_index >= 0 && static_cast<size_t>(pack_index) < rows_.size() ? &rows_[static_cast<size_t>(pack_index)]
                                                                             : nullptr;
  }

 private:
  std::vector<PackRow> rows_;
};

// Activations in memory while a step runs.
class ActivationMeter {
 public:
  // `kept`: bytes by node that the schedule keeps. `resident`: what the engine has on the device. `steps`: steps begun;
  // where another begins meanwhile, the two cannot be told apart, and neither is measured.
  ActivationMeter(std::vector<int64_t> kept, std::shared_ptr<const Gauge> resident, std::shared_ptr<const Gauge> steps,
                  bool on)
      : is_on(on), kept_(std::move(kept)), resident_(std::move(resident)), steps_(std::move(steps)), step_(steps_->now) {}

  // `node` -1: none begins. `more_bytes`: what is about to come back.
  void weigh(int64_t node, int64_t more_bytes);

  bool is_on;
  int64_t stayed_bytes = 0;  // of what was to leave and could not
  int64_t peak_bytes = 0;

 private:
  const std::vector<int64_t> kept_;
  const std::shared_ptr<const Gauge> resident_;
  const std::shared_ptr<const Gauge> steps_;
  const int64_t step_;
};

class ScheduleCursor {
 public:
  // quiet: nothing is due. due: something is. unwatched: the recorded backward did not ask for it. back: it asked for it
  // before the present node.
  enum class Ask : uint8_t { quiet, due, unwatched, back };
  // `due`: the schedule keeps it, and Python has to act at the node that begins.
  enum class Verdict : uint8_t { undecided, kept, due };

  ScheduleCursor(std::shared_ptr<const PackTable> table, std::shared_ptr<NodeClock> clock,
                 std::shared_ptr<ActivationMeter> meter)
      : table_(std::move(table)), clock_(std::move(clock)), meter_(std::move(meter)) {}

  // Decides a pack where the schedule keeps a tensor of this size.
  Verdict pack(int64_t pack_index, int64_t nbytes);
  // Whether a pack that is kept shows a storage that is counted already.
  bool keeps_again(int64_t pack_index) const { return row(pack_index) != nullptr && row(pack_index)->is_kept_again; }
  // The same as `pack` for the unpack of a tensor that stayed. False: undecided, and nothing has changed.
  bool unpack(int64_t pack_index);
  // Whether the unpack of a tensor that stayed moves the schedule on.
  bool watches(int64_t pack_index) const { return row(pack_index) != nullptr && row(pack_index)->watched >= 0; }
  // A node begins, at the beginning of a hook of Python's. Whether something is due there.
  bool arrive(int64_t next_node);
  // The same for the unpack of any tensor, which begins its node where the step goes on as recorded.
  Ask ask(int64_t pack_index);
  bool has_used(int64_t pack_index) const;
  void forget_uses() { used_.clear(); }

  int64_t node = 0;
  int64_t next_due = 0;          // the node at which a release or a prefetch is due
  bool is_on_schedule = true;    // the step runs as recorded
  bool decides = true;           // false: Python times every hook, with events of a device

 private:
  bool is_due(int64_t next_node) const;
  void use(int64_t pack_index);
  const PackRow* row(int64_t pack_index) const { return is_on_schedule ? table_->find(pack_index) : nullptr; }

  const std::shared_ptr<const PackTable> table_;
  const std::shared_ptr<NodeClock> clock_;
  const std::shared_ptr<ActivationMeter> meter_;
  std::vector<bool> used_;  // by pack index
};

}  // namespace offload
