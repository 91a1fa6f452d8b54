#include "copy_log.h"

#include <algorithm>
#include <chrono>
#include <new>

namespace offload {
namespace {

constexpr int kAnchorAttempts = 3;
constexpr double kAnchorSecondsMax = 10;  // CUDA returns milliseconds as a float, exact to 1 µs up to this time

}  // namespace

const char* kind_name(CopyKind kind) {
  static constexpr const char* kNames[] = {"out", "in", "spill", "fill"};
  return kNames[static_cast<size_t>(kind)];
}

double now_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// On an idle stream the event completes between two readings of the clock. The attempt with the smallest gap between
// these readings is the most precise.
std::shared_ptr<const Anchor> Anchor::measure(Driver& device, EventPool& events) {
  const OwnedStream stream(device);
  auto best = std::make_shared<Anchor>();
  double best_gap_seconds = 0;
  for (int attempt = 0; attempt < kAnchorAttempts; ++attempt) {
    const double before = now_seconds();
    const EventRef event = events.record(stream);
    device.event_synchronize(event.get());
    const double gap_seconds = now_seconds() - before;
    if (attempt > 0 && gap_seconds >= best_gap_seconds) continue;
    best_gap_seconds = gap_seconds;
    best->event = event;
    best->host_seconds = before + gap_seconds / 2;
  }
  return best;
}

bool Anchor::is_old() const { return now_seconds() - host_seconds > kAnchorSecondsMax; }

void CopyLog::start(size_t limit, std::shared_ptr<const Anchor> anchor) {
  limit_ = limit;
  anchor_ = std::move(anchor);
  pending_.clear();
}

void CopyLog::push(Pending pending) {
  if (!is_on()) return;
  if (pending_.size() >= limit_) pending_.pop_front();
  try {
    pending_.push_back(std::move(pending));
  } catch (const std::bad_alloc&) {
    // The copy is missing from the timeline; the copy itself is not affected.
  }
}

void CopyLog::add(CopyKind kind, uint64_t ticket_id, size_t bytes, double begin_seconds) {
  if (is_on()) push({{kind, ticket_id, bytes, begin_seconds, now_seconds()}, nullptr, nullptr, nullptr});
}

void CopyLog::add(CopyKind kind, uint64_t ticket_id, size_t bytes, EventRef begin, EventRef end) {
  if (is_on()) push({{kind, ticket_id, bytes, 0, 0}, std::move(begin), std::move(end), anchor_});
}

std::vector<CopyEntry> CopyLog::take() {
  for (Pending& each : pending_) {
    if (each.begin == nullptr || !device_->event_done(each.end.get())) continue;
    const auto seconds = [&](const EventRef& event) {
      return each.anchor->host_seconds + 1e-3 * device_->event_elapsed_ms(each.anchor->event.get(), event.get());
    };
    each.entry.begin_seconds = seconds(each.begin);
    each.entry.end_seconds = seconds(each.end);
    each.begin = nullptr;  // complete: if the device fails at a later entry, the next call returns this one
  }
  const auto ended = std::stable_partition(pending_.begin(), pending_.end(),
                                           [](const Pending& each) { return each.begin != nullptr; });
  std::vector<CopyEntry> done;
  for (auto each = ended; each != pending_.end(); ++each) done.push_back(each->entry);
  pending_.erase(ended, pending_.end());
  std::stable_sort(done.begin(), done.end(),
                   [](const CopyEntry& a, const CopyEntry& b) { return a.end_seconds < b.end_seconds; });
  return done;
}

}  // namespace offload
