// Chooses the nodes at which the tensors of a given set are released and prefetched (offload/plan/placement.py).
//
// The planner tries thousands of sets for a plan, so this is native code. It uses plain numbers: no Python
// objects, no tensors.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace offload {

// One value for each tensor, in copy-out order: by the node that saves the tensor, then by id.
struct TensorTable {
  std::vector<int64_t> bytes;
  std::vector<int> packed;          // the node that saves the tensor
  std::vector<int> release_min;     // the first node at which it may be released
  std::vector<int> first_backward;  // the node of its first use in backward
  std::vector<double> out_seconds;
  std::vector<double> in_seconds;
  std::vector<double> overhead_seconds;
  std::vector<int> copy_in_rank;  // its position in the order of first uses in backward
};

// At `node`, computation waits `seconds` for a copy of `tensor`.
struct PlacementStall {
  double seconds;
  int node;
  int tensor;
  bool is_out;
};

struct Placement {
  double step_seconds = 0.0;
  std::vector<int> indices;     // the swapped tensors in copy-out order
  std::vector<int> releases;    // a node for each of them
  std::vector<int> prefetches;  // likewise
  std::vector<PlacementStall> stalls;
};

using NotBefore = std::unordered_map<int, int>;  // tensor -> first node at which it may be prefetched

class Placer {
 public:
  // `seconds` and `unswapped_bytes`: of each node. Throws std::invalid_argument if the numbers of values differ, or
  // unless packed < release_min <= first_backward < number of nodes.
  Placer(TensorTable tensors, std::vector<double> seconds, std::vector<int64_t> unswapped_bytes);

  // Per node: the limit minus the resident bytes, if each tensor is swapped out for as long as is allowed. Here and
  // below, throws std::out_of_range if a tensor does not exist.
  std::vector<int64_t> headroom(const std::vector<int>& indices, int64_t limit_bytes) const;

  // Leaves out tensors that save no memory, and then chooses the nodes of the others again. Nothing if the set cannot
  // stay within the limit, or if the step takes longer than `cutoff_seconds` even without waits for copy-ins.
  std::optional<Placement> place(std::vector<int> indices, int64_t limit_bytes, double cutoff_seconds,
                                 double safety_factor, const NotBefore& not_before) const;

  // The release of each given tensor, in copy-out order, as `place` chooses it before it leaves out any tensor.
  std::vector<int> releases(std::vector<int> indices, int64_t limit_bytes) const;

 private:
  struct Releases {
    std::vector<int> nodes;     // by position in `indices`
    std::vector<double> ready;  // when each node can start if no copy-in is late
  };

  void check(const std::vector<int>& indices) const;
  Releases choose_releases(const std::vector<int>& indices, const std::vector<int64_t>& headroom) const;
  std::vector<int> choose_prefetches(const std::vector<int>& indices, std::vector<int64_t> free,
                                     const Releases& released, double safety_factor,
                                     const NotBefore& not_before) const;
  Placement timed(std::vector<int> indices, std::vector<int> releases, std::vector<int> prefetches) const;
  double overhead(const std::vector<int>& indices) const;
  std::vector<size_t> by_use(const std::vector<int>& indices) const;
  size_t node_count() const { return seconds_.size(); }

  TensorTable tensors_;
  std::vector<double> seconds_;
  std::vector<int64_t> unswapped_bytes_;
  std::vector<double> clock_;  // without waits: each node's start, then the step's end
};

}  // namespace offload
