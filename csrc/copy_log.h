// The copies that a timeline shows: begin and end of each copy of a ticket, in seconds of CLOCK_MONOTONIC. Off by
// default.
//
// Host copies are added with their times. Device copies are added with the events around them; take() reads their times
// once they have completed. An anchor (an event, and the host's time when it completed) relates the device's clock to
// the host's.
//
// Bounded: beyond its limit the oldest entries are dropped. Not thread safe: the swap store calls it under its lock,
// except for Anchor::measure, which waits for the device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "event_pool.h"

namespace offload {

enum class CopyKind : uint8_t { out, in, spill, fill };

const char* kind_name(CopyKind kind);

struct CopyEntry {
  CopyKind kind;
  uint64_t ticket_id;
  size_t bytes;
  double begin_seconds;  // when the copy of the first slice began
  double end_seconds;    // when the copy of the last slice ended
};

double now_seconds();

struct Anchor {
  EventRef event;
  double host_seconds = 0;

  // Throws DriverError.
  static std::shared_ptr<const Anchor> measure(Driver& device, EventPool& events);
  bool is_old() const;
};

class CopyLog {
 public:
  explicit CopyLog(std::shared_ptr<Driver> device) : device_(std::move(device)) {}

  // Keeps the newest `limit` copies from now on; 0 stops and clears the log.
  void start(size_t limit, std::shared_ptr<const Anchor> anchor);
  bool is_on() const { return limit_ > 0; }
  // Sets the anchor of the device copies added from now on. Their times are the more exact, the closer they are to it.
  void set_anchor(std::shared_ptr<const Anchor> anchor) { anchor_ = std::move(anchor); }
  const std::shared_ptr<const Anchor>& anchor() const { return anchor_; }

  void add(CopyKind kind, uint64_t ticket_id, size_t bytes, double begin_seconds);  // ends now
  void add(CopyKind kind, uint64_t ticket_id, size_t bytes, EventRef begin, EventRef end);
  // Returns the copies that have ended, in the order of their ends; each is returned once. Throws DriverError.
  std::vector<CopyEntry> take();

 private:
  struct Pending {
    CopyEntry entry;
    EventRef begin;  // null if the entry has its times already
    EventRef end;
    std::shared_ptr<const Anchor> anchor;
  };

  void push(Pending pending);

  const std::shared_ptr<Driver> device_;
  size_t limit_ = 0;
  std::shared_ptr<const Anchor> anchor_;
  std::deque<Pending> pending_;
};

}  // namespace offload
