// A walk: one seed's life of a swap store, as autograd's hooks would lead it, only less kindly.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "world.h"

namespace offload::campaign {

struct WalkOptions {
  std::string tier = "slab";  // slab, slab+disk, direct
  LaneOrder schedule = LaneOrder::stepped;
  uint64_t seed = 0;
  int steps = 60;
  std::string directory;
};

struct WalkResult {
  std::string failure;  // empty: every byte came back, and nothing was left behind
  uint64_t returned = 0;
  uint64_t faults = 0;  // injected
  uint64_t digest = 0;  // of the order in which kernels ran, and of what the store answered
  std::vector<Entry> log;
};

WalkResult walk(const WalkOptions& options);

}  // namespace offload::campaign
