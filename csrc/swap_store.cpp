#include "swap_store.h"

#include <chrono>
#include <stdexcept>

#include "mutants.h"

namespace offload {
namespace {

constexpr uint16_t bit(State state) { return static_cast<uint16_t>(1U << static_cast<unsigned>(state)); }

uint16_t successors(State state) {
  switch (state) {
    case State::queued:
      return bit(State::copying_out) | bit(State::out) | bit(State::cancelled) | bit(State::failed);
    case State::copying_out:
      return bit(State::out) | bit(State::on_disk) | bit(State::copying_in) | bit(State::failed);
    case State::out:
      return bit(State::spilling) | bit(State::copying_in);
    case State::spilling:
      return bit(State::on_disk) | bit(State::out) | bit(State::copying_in);
    case State::on_disk:
      return bit(State::filling) | bit(State::copying_in);
    case State::filling:
      return bit(State::arriving) | bit(State::on_disk);
    case State::copying_in:
      return bit(State::arriving) | bit(State::ready) | bit(State::on_disk) | bit(State::out);
    case State::arriving:
      return bit(State::ready) | bit(State::copying_in) | bit(State::filling);
    case State::ready:  // with retain_graph, the same bytes may be swapped in again
      return bit(State::copying_in) | bit(State::filling) | bit(State::spilling);
    case State::cancelled:
    case State::failed:
    case State::released:
      return 0;
  }
  return 0;
}

template <typename Reference>
union Leaked {  // a reference that is never released
  Reference kept;
  ~Leaked() {}
};

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin_).count(); }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace

const char* state_name(State state) {
  static constexpr const char* kNames[] = {"queued",     "copying_out", "out",   "spilling",  "on_disk", "filling",
                                           "copying_in", "arriving",    "ready", "cancelled", "failed",  "released"};
  return kNames[static_cast<size_t>(state)];
}

void advance(Slot& slot, State to) {
  const State from = slot.state.load();
  if (to != State::released && !(successors(from) & bit(to)))
    throw std::logic_error(std::string("a ticket cannot go from ") + state_name(from) + " to " + state_name(to));
  slot.state.store(to);
}

void SwapStore::require_prefetchable(const Slot& slot) {
  const State now = slot.state;
  if (now == State::cancelled || now == State::failed)
    throw std::logic_error(std::string("nothing was swapped out: the ticket is ") + state_name(now));
  if (now == State::filling || now == State::copying_in)
    throw std::logic_error("a copy-in of this ticket is under way");
}

void SwapStore::set_target(Slot& slot, void* target, std::shared_ptr<void>& owner) {
  slot.target = target;
  OFFLOAD_EDGE("copy-in holds its target's owner", slot.target_owner.swap(owner));
  OFFLOAD_EDGE("a second copy-in clears the failure of the first", slot.failure = nullptr);
}

void SwapStore::require_swapped_in(const Slot& slot) {
  if (OFFLOAD_BROKEN("a read that failed is reported")) return;
  if (slot.failure != nullptr) std::rethrow_exception(slot.failure);
  if (slot.state != State::ready)
    throw std::logic_error(std::string("swap_in was called before prefetch: the ticket is ") + state_name(slot.state));
}

Ticket SwapStore::swap_out(const void* source, size_t bytes, Stream compute, uint64_t need) {
  lanes_->require_same_process();
  lanes_->run_some();
  return {shared_from_this(), queue_copy_out(source, bytes, compute, need)};
}

void SwapStore::add_stall(double seconds) {
  std::lock_guard lock(mutex_);
  stats_.stall_seconds += seconds;
}

void SwapStore::record_copies(size_t limit) {
  lanes_->require_same_process();
  const auto anchor = limit > 0 ? Anchor::measure(*device_, *events_) : nullptr;
  std::lock_guard lock(mutex_);
  log_.start(limit, anchor);
}

std::vector<CopyEntry> SwapStore::take_copies() {
  lanes_->require_same_process();
  std::unique_lock lock(mutex_);
  std::vector<CopyEntry> ended = log_.take();
  const bool is_old = log_.is_on() && log_.anchor()->is_old();
  lock.unlock();
  if (!is_old) return ended;
  const auto anchor = Anchor::measure(*device_, *events_);
  lock.lock();
  if (log_.is_on()) log_.set_anchor(anchor);
  return ended;
}

std::string Ticket::failure_text() const {
  std::lock_guard lock(store_->mutex_);
  if (slot_->failure == nullptr) return "";
  try {
    std::rethrow_exception(slot_->failure);
  } catch (const std::exception& error) {
    return error.what();
  }
}

bool Ticket::out_done() {
  if (store_->lanes_->in_forked_child()) return false;  // no lane runs in a forked child
  switch (state()) {
    case State::queued:
    case State::copying_out:
    case State::out:  // also after a failed copy-in, when the copy-out may still read the source
    case State::copying_in:
    case State::arriving:
    case State::ready:
      store_->lanes_->run_some();
      return store_->out_done(*slot_);
    default:
      return true;
  }
}

void Ticket::wait_out(Stream compute) {
  store_->require_same_process();
  if (out_done()) return;
  const Stopwatch watch;
  store_->issue_out(*slot_);
  if (state() == State::cancelled || state() == State::failed) return;
  OFFLOAD_EDGE("source outlives its copy-out", store_->device_->stream_wait(compute, slot_->out_event.get()));
  store_->add_stall(watch.seconds());
}

bool Ticket::cancel() {
  if (store_->lanes_->in_forked_child()) return false;
  return store_->cancel(*slot_);
}

void Ticket::prefetch(void* target, Stream compute, std::shared_ptr<void> owner) {
  store_->lanes_->require_same_process();
  store_->lanes_->run_some();
  store_->prefetch(slot_, target, compute, std::move(owner));
}

bool Ticket::in_done() {
  if (store_->lanes_->in_forked_child()) return true;
  store_->lanes_->run_some();
  std::lock_guard lock(store_->mutex_);
  const State now = state();
  // Part of the copy-in has not been issued, so there is no event for its end yet.
  if (!OFFLOAD_BROKEN("copy-in ends with its last slice") && (now == State::filling || now == State::copying_in))
    return false;
  return slot_->in_event == nullptr || store_->device_->event_done(slot_->in_event.get());
}

void Ticket::swap_in(Stream compute) {
  store_->lanes_->require_same_process();
  const Stopwatch watch;
  store_->swap_in(slot_, compute);
  store_->add_stall(watch.seconds());
}

void Ticket::settle() {
  store_->lanes_->require_same_process();
  store_->settle(slot_);
}

Ticket& Ticket::operator=(Ticket&& other) noexcept {
  release();
  store_ = std::move(other.store_);
  slot_ = std::move(other.slot_);
  return *this;
}

void Ticket::release() noexcept {
  if (slot_ == nullptr) return;
  // A forked child has no lanes, and its copy of the mutex may stay locked forever: it leaks the slot.
  if (store_->lanes_->in_forked_child() && !OFFLOAD_BROKEN("a forked child does not free its tickets")) {
    const Leaked<SlotRef> slot{slot_};
    const Leaked<std::shared_ptr<SwapStore>> store{store_};
  } else {
    store_->release(slot_);
  }
  slot_ = nullptr;
}

}  // namespace offload
