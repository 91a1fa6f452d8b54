// The copies of one step that follows a schedule: the storages it has swapped out, and the releases and prefetches that
// come next.
//
// On the data path: swap_hooks.cpp and executor.py report swapped storages here, and have done what is due at a node.
// It holds weak references only. Callers hold the GIL; a function that returns false leaves a Python error.
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
  // `prefetched`: counts copy-ins. `without_memory`: those that found none, and are left to demand.
  StepCopies(std::shared_ptr<ScheduleCursor> cursor, std::shared_ptr<Gauge> prefetched,
             std::shared_ptr<Gauge> without_memory);

  StepCopies(const StepCopies&) = delete;
  StepCopies& operator=(const StepCopies&) = delete;
  ~StepCopies() { stop_watching(); }

  // The copy-out of a pack's tensor has begun.
  bool add(int64_t pack_index, PyObject* storage, PyObject* tensor);
  // The storage of a pack, if its graph is alive: a new reference, or null without an error.
  Owned find(int64_t pack_index) const;
  // Waits for the copy-outs and begins the copy-ins that are due at a node.
  bool act(int64_t node);
  // Backward goes on at an earlier node: what it uses from there on is prefetched again.
  void rewind(int64_t node);
  // Packs of swapped storages that somebody else holds, so that swapping them freed nothing. Watches them no longer.
  bool find_held(std::set<int64_t>* held);

  const std::shared_ptr<ScheduleCursor> cursor;
  bool caps_in_flight = false;  // the engine's limit on sources held for their copy-out applies
  bool finds_held = false;      // swapped storages of torch's are watched until `find_held`
  std::set<int64_t> missed;     // packs of what backward asked for before its copy-in had begun

 private:
  bool prefetch(int64_t pack_index);
  void look_ahead();
  void stop_watching();

  const std::shared_ptr<Gauge> prefetched_, without_memory_;
  std::vector<Owned> storages_;  // weak references, by pack index
  std::vector<std::pair<int64_t, Owned>> watched_;  // torch's weak references to storages, by pack index
  size_t next_release_ = 0, next_prefetch_ = 0;
};

}  // namespace offload
