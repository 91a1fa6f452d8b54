#include "step_copies.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "mutants.h"
#include "python_errors.h"
#include "swapped_storage.h"

namespace offload {
namespace {

// Waits until no copy-in writes to the storage's memory any more. False: a Python error.
bool wait_copied_in(PyObject* storage) {
  const std::shared_ptr<Ticket> ticket = swapped(storage).ticket;  // kept while the GIL is released
  return without_exceptions([&] {
    const GilRelease release;
    if (ticket != nullptr) ticket->settle();
  });
}

}  // namespace

StepCopies::StepCopies(std::shared_ptr<ScheduleCursor> step_cursor, std::shared_ptr<Gauge> prefetched,
                       std::shared_ptr<Gauge> without_memory)
    : cursor(std::move(step_cursor)), prefetched_(std::move(prefetched)), without_memory_(std::move(without_memory)) {
  update_next_due();
}

bool StepCopies::add(int64_t pack_index, PyObject* storage, PyObject* source) {
  const auto position = static_cast<size_t>(pack_index);
  if (position >= storages_.size()) storages_.resize(position + 1);
  storages_[position] = Owned(PyWeakref_NewRef(storage, nullptr));
  if (!storages_[position] || !finds_held) return static_cast<bool>(storages_[position]);
  Owned watch(PyObject_CallOneArg(tensors.watch_storage, source));
  if (!watch) return false;
  watched_.emplace_back(pack_index, std::move(watch));
  return true;
}

bool StepCopies::find_held(std::set<int64_t>* held) {
  finds_held = false;
  for (const auto& [pack_index, watch] : watched_) {
    const Owned storage = find(pack_index);
    if (!storage || !is_swapped_out(swapped(storage.get()))) continue;
    const int is_gone = is_true(PyObject_CallOneArg(tensors.storage_is_gone, watch.get()));
    if (is_gone < 0) return false;
    if (!is_gone) held->insert(pack_index);
  }
  stop_watching();
  return true;
}

void StepCopies::stop_watching() {
  PyObject *error, *value, *traceback;
  PyErr_Fetch(&error, &value, &traceback);
  for (const auto& [pack_index, watch] : std::exchange(watched_, {}))
    if (!Owned(PyObject_CallOneArg(tensors.unwatch_storage, watch.get()))) PyErr_Clear();
  PyErr_Restore(error, value, traceback);
}

Owned StepCopies::find(int64_t pack_index) const {
  const auto position = static_cast<size_t>(pack_index);
  if (position >= storages_.size() || !storages_[position]) return Owned();
  return referent(storages_[position].get());
}

bool StepCopies::act(int64_t node) {
  const bool done = run_due(node);
  update_next_due();
  return done;
}

bool StepCopies::run_due(int64_t node) {
  const PackTable& table = cursor->table();
  while (next_release_ < table.releases.size() && table.releases[next_release_].node <= node) {
    // Incremented first: while this thread waits, another thread may act.
    const Owned storage = find(table.releases[next_release_++].pack_index);
    if (storage && !wait_copied_out(storage.get())) return false;
  }
  if (!make_calls({node, true})) return false;
  const size_t first = next_prefetch_;
  while (next_prefetch_ < table.prefetches.size() && table.prefetches[next_prefetch_].node <= node)
    if (!prefetch(table.prefetches[next_prefetch_++].pack_index)) return false;
  if (!make_calls({node + 1, false})) return false;
  for (size_t due = first; table.waits_for_prefetches && due < next_prefetch_; ++due) {
    const Owned storage = find(table.prefetches[due].pack_index);
    if (storage && !wait_copied_in(storage.get())) return false;
  }
  return true;
}

void StepCopies::call_at(std::vector<CallPoint> calls, Owned callback) {
  calls_ = std::move(calls);
  callback_ = std::move(callback);
  next_call_ = 0;
  update_next_due();
}

bool StepCopies::make_calls(const CallPoint& end) {
  while (next_call_ < calls_.size() && calls_[next_call_] < end) {
    const Owned place(PyLong_FromSize_t(next_call_++));  // incremented first: the call may run Python code that acts
    if (!place || !Owned(PyObject_CallOneArg(callback_.get(), place.get()))) return false;
  }
  return true;
}

bool StepCopies::prefetch(int64_t pack_index) {
  const Owned storage = find(pack_index);
  if (!storage) return true;
  bool began = false, done = false;
  if (without_exceptions([&] { done = offload::prefetch(storage.get(), &began); }) && done) {
    prefetched_->add(began);
    return true;
  }
  if (!PyErr_ExceptionMatches(tensors.out_of_memory)) return false;
  PyErr_Clear();
  without_memory_->add(1);  // the tensor is loaded on demand later, when there may be room
  return true;
}

void StepCopies::rewind(int64_t node) {
  const auto& prefetches = cursor->table().prefetches;
  const auto found =
      std::find_if(prefetches.begin(), prefetches.end(), [node](const DueCopy& due) { return due.use >= node; });
  next_prefetch_ = static_cast<size_t>(found - prefetches.begin());
  update_next_due();
}

void StepCopies::update_next_due() {
  const PackTable& table = cursor->table();
  int64_t due = std::numeric_limits<int64_t>::max();
  if (next_release_ < table.releases.size()) due = table.releases[next_release_].node;
  if (next_prefetch_ < table.prefetches.size()) due = std::min(due, table.prefetches[next_prefetch_].node);
  if (next_call_ < calls_.size()) due = std::min(due, calls_[next_call_].first);
  cursor->next_due = due;
}

}  // namespace offload
