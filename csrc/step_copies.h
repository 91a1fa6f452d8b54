// The copies of one step that follows a schedule: the storages that it has swapped out, and the releases and prefetches
// that are still to come. A release waits for a copy-out and frees its source.
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

  // Adds a storage whose copy-out has begun, by the index of its pack. `source`: torch's storage.
  bool add(int64_t pack_index, PyObject* storage, PyObject* source);
  // Returns the storage of a pack, if its graph is alive: a new reference, or null without an error.
  Owned find(int64_t pack_index) const;
  // A node, and whether a call there comes after the prefetches of the node.
  using Call = std::pair<int64_t, bool>;
  // Lets `act` call `callback` when the step reaches each of these nodes, with the place in `calls`, which ascends.
  // Replaces earlier calls.
  void call_at(std::vector<Call> calls, Owned callback);
  // Waits for the copy-outs, makes the calls and begins the copy-ins that are due at a node.
  bool act(int64_t node);
  // Called when backward continues at an earlier node: storages used from that node on are prefetched again.
  void rewind(int64_t node);
  // Finds the packs of swapped storages that other code still holds: swapping them freed nothing. Stops watching.
  bool find_held(std::set<int64_t>* held);

  const std::shared_ptr<ScheduleCursor> cursor;
  bool caps_in_flight = false;  // in_flight_bytes_max of the engine applies
  bool finds_held = false;      // torch's storages of swapped tensors are watched until `find_held`
  std::set<int64_t> missed;     // packs of tensors that backward needed before their copy-ins had begun

 private:
  bool run_due(int64_t node);
  bool prefetch(int64_t pack_index);
  // Makes the calls that are due before this one would be.
  bool make_calls(const Call& end);
  void look_ahead();
  void stop_watching();

  const std::shared_ptr<Gauge> prefetched_, without_memory_;
  std::vector<Owned> storages_;  // weak references, by pack index
  std::vector<std::pair<int64_t, Owned>> watched_;  // torch's weak references to storages, by pack index
  std::vector<Call> calls_;
  Owned callback_;
  size_t next_release_ = 0, next_prefetch_ = 0, next_call_ = 0;
};

}  // namespace offload
