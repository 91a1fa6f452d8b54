#include "order.h"

#include <iterator>

namespace sim {

void Order::split(uintptr_t place) {
  const auto next = spans_.upper_bound(place);
  if (next == spans_.begin()) return;
  const auto span = std::prev(next);
  if (span->first == place || span->second.end <= place) return;
  spans_.emplace_hint(next, place, span->second);
  span->second.end = place;
}

void Order::check(const Actor& actor, const Access& before, bool wrote, bool is_write, const char* what,
                  std::vector<std::string>& findings) {
  if (before.actor == actor.number || actor.knows.has(before.actor, before.count)) return;
  findings.push_back(std::string(what) + (is_write ? " writes" : " reads") + " on " + actor.name + " what " +
                     before.what + (wrote ? " writes" : " reads") + " on " + before.where + ", in no order");
}

void Order::access(Actor& actor, const void* address, size_t bytes, bool is_write, const char* what,
                   std::vector<std::string>& findings) {
  if (!watches_ || bytes == 0) return;
  const Access now{actor.number, actor.knows.next(actor.number), what, actor.name};
  auto at = reinterpret_cast<uintptr_t>(address);
  const uintptr_t end = at + bytes;
  split(at);
  split(end);
  while (at < end) {
    auto span = spans_.lower_bound(at);
    if (span == spans_.end() || span->first > at) {
      const uintptr_t until = span == spans_.end() ? end : std::min(end, span->first);
      span = spans_.emplace_hint(span, at, Span{until, {}, {}});
    }
    auto& [its_end, writes, reads] = span->second;
    for (const Access& each : writes) check(actor, each, true, is_write, what, findings);
    if (is_write) {
      for (const Access& each : reads) check(actor, each, false, is_write, what, findings);
      reads.clear();
      writes = {now};
    } else {
      const auto is_own = [&](const Access& each) { return each.actor == actor.number; };
      reads.erase(std::remove_if(reads.begin(), reads.end(), is_own), reads.end());
      reads.push_back(now);
    }
    at = its_end;
  }
}

void Order::forget(const void* address, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  split(begin);
  split(begin + bytes);
  spans_.erase(spans_.lower_bound(begin), spans_.lower_bound(begin + bytes));
}

}  // namespace sim
