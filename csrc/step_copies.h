// The copies of one step that follows a schedule: the storages that the step has swapped out, and the releases and
// prefetches that are still to come. A release waits for a copy-out and frees its source.
//
// On the data path: swap_hooks.cpp and executor.py report swapped storages here, and call `act` at nodes where copies
// are due. StepCopies holds only weak references to storages. Callers hold the GIL; a function that returns false sets a
// Python error.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "gauge.h"
#include "schedule_cursor.h"
#include "tensor_interface.h"

namespace offload {

class StepCopies {
 public:
  // `prefetched` counts the copy-ins that `act` has begun. `without_memory` counts the prefetches that failed because
  // there was no device memory; backward swaps in these tensors on demand.
  StepCopies(std::shared_ptr<ScheduleCursor> cursor, std::shared_ptr<Gauge> prefetched,
             std::shared_ptr<Gauge> without_memory);

  StepCopies(const StepCopies&) = delete;
  StepCopies& operator=(const StepCopies&) = delete;
  ~StepCopies() { stop_watching(); }

  // Adds a SwappedStorage whose copy-out has begun, by the index of its pack. `source`: torch's storage.
  bool add(int64_t pack_index, PyObject* storage, PyObject* source);
  // Returns the storage of a pack, if its graph is alive: a new reference, or null without an error.
  Owned find(int64_t pack_index) const;
  // When a call is made: the node, and whether it comes after the node's prefetches.
  using CallPoint = std::pair<int64_t, bool>;
  // Lets `act` call `callback` when the step reaches each of these points, which are sorted. The argument is the index
  // in `calls`. Replaces earlier calls.
  void call_at(std::vector<CallPoint> calls, Owned callback);
  // Does what is due at a node: waits for copy-outs, makes the calls before prefetches, begins copy-ins, makes the other
  // calls. If the schedule says so (`waits_for_prefetches`), waits for these copy-ins.
  bool act(int64_t node);
  // Called when backward continues at an earlier node: storages used from that node on are prefetched again.
  void rewind(int64_t node);
  // Finds the packs of swapped storages that other code still holds: swapping them freed nothing. Stops watching.
  bool find_held(std::set<int64_t>* held);

  const std::shared_ptr<ScheduleCursor> cursor;
  bool caps_in_flight = false;  // whether the engine's in_flight_bytes_max limits this step's copy-outs
  bool finds_held = false;      // whether `add` keeps a weak reference to torch's storage, for `find_held`
  std::set<int64_t> missed;     // packs of tensors that backward needed before their copy-ins had begun

 private:
  bool run_due(int64_t node);
  bool prefetch(int64_t pack_index);
  // Makes the calls at points before `end`.
  bool make_calls(const CallPoint& end);
  void update_next_due();
  void stop_watching();

  const std::shared_ptr<Gauge> prefetched_, without_memory_;
  std::vector<Owned> storages_;  // weak references, by pack index
  std::vector<std::pair<int64_t, Owned>> watched_;  // torch's weak references to storages, by pack index
  std::vector<CallPoint> calls_;
  Owned callback_;
  size_t next_release_ = 0, next_prefetch_ = 0, next_call_ = 0;
};

}  // namespace offload
