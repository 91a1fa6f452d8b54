// Who touched which bytes, and what orders it: vector clocks over streams and the host, for the machine beside this.
//
// Judged when work is queued, not when it runs: a missing wait is found whatever the threads happened to do.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace sim {

// What is known to have happened: by actor, how many of its accesses.
class Knowledge {
 public:
  void learn(const Knowledge& other) {
    if (counts_.size() < other.counts_.size()) counts_.resize(other.counts_.size());
    for (size_t actor = 0; actor < other.counts_.size(); ++actor)
      counts_[actor] = std::max(counts_[actor], other.counts_[actor]);
  }
  bool has(size_t actor, uint64_t count) const { return actor < counts_.size() && counts_[actor] >= count; }
  uint64_t next(size_t actor) {
    if (counts_.size() <= actor) counts_.resize(actor + 1);
    return ++counts_[actor];
  }

 private:
  std::vector<uint64_t> counts_;
};

// A stream, a piece of file I/O, or the host: all its threads as one, which means fewer findings and none that is wrong.
struct Actor {
  size_t number = 0;
  const char* name = "the host";  // stays valid
  Knowledge knows;
};

// Not safe for threads: the machine's lock is held by whoever calls.
class Order {
 public:
  // Forgets every access, and from now on takes note of them or not.
  void watch(bool watches) {
    watches_ = watches;
    spans_.clear();
  }
  bool watches() const { return watches_; }

  // `actor` will read or write these bytes: whatever else did must be known to it to have ended by then. What is not is
  // added to `findings`. `what` stays valid.
  void access(Actor& actor, const void* address, size_t bytes, bool is_write, const char* what,
              std::vector<std::string>& findings);

  // The bytes are something else from now on: pinned memory that is pinned no more.
  void forget(const void* address, size_t bytes);

 private:
  struct Access {
    size_t actor = 0;
    uint64_t count = 0;
    const char* what = "";
    const char* where = "";
  };
  struct Span {
    uintptr_t end = 0;
    std::vector<Access> writes;  // the last, if any
    std::vector<Access> reads;   // since then, the last of each actor
  };

  void split(uintptr_t place);
  static void check(const Actor& actor, const Access& before, bool wrote, bool is_write, const char* what,
                    std::vector<std::string>& findings);

  bool watches_ = false;
  std::map<uintptr_t, Span> spans_;  // disjoint, by their beginning
};

}  // namespace sim
