#include "placement.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <numeric>
#include <queue>
#include <stdexcept>
#include <utility>

namespace offload {
namespace {

size_t at(int value) { return static_cast<size_t>(value); }

// Sorts `positions` by their keys. Those with equal keys keep the order that they have in `positions`.
std::vector<size_t> sorted_by(const std::vector<int>& keys, std::vector<size_t> positions) {
  std::stable_sort(positions.begin(), positions.end(), [&](size_t a, size_t b) { return keys[a] < keys[b]; });
  return positions;
}

std::vector<size_t> positions(size_t count) {
  std::vector<size_t> all(count);
  std::iota(all.begin(), all.end(), size_t{0});
  return all;
}

// Keeps the elements of `values` whose flag is false.
void drop(std::vector<int>& values, const std::vector<char>& flags) {
  size_t kept = 0;
  for (size_t j = 0; j < values.size(); ++j) {
    if (!flags[j]) values[kept++] = values[j];
  }
  values.resize(kept);
}

}  // namespace

Placer::Placer(TensorTable tensors, std::vector<double> seconds, std::vector<int64_t> unswapped_bytes)
    : tensors_(std::move(tensors)), seconds_(std::move(seconds)), unswapped_bytes_(std::move(unswapped_bytes)) {
  const size_t count = tensors_.bytes.size();
  for (const size_t other : {tensors_.packed.size(), tensors_.release_min.size(), tensors_.first_backward.size(),
                             tensors_.out_seconds.size(), tensors_.in_seconds.size(),
                             tensors_.overhead_seconds.size(), tensors_.copy_in_rank.size()}) {
    if (other != count) throw std::invalid_argument("Placer: columns of tensors differ in length");
  }
  if (unswapped_bytes_.size() != seconds_.size()) {
    throw std::invalid_argument("Placer: unswapped_bytes needs one value per node");
  }
  const int nodes = static_cast<int>(seconds_.size());
  for (size_t i = 0; i < count; ++i) {
    const bool exists = tensors_.packed[i] >= 0 && tensors_.packed[i] < tensors_.release_min[i] &&
                        tensors_.release_min[i] <= tensors_.first_backward[i] && tensors_.first_backward[i] < nodes;
    if (!exists) {
      throw std::invalid_argument("Placer: a tensor violates 0 <= packed < release_min <= first_backward < nodes");
    }
  }
  clock_.reserve(seconds_.size() + 1);
  clock_.push_back(0.0);
  for (const double each : seconds_) clock_.push_back(clock_.back() + each);
}

void Placer::check(const std::vector<int>& indices) const {
  for (const int i : indices) {
    if (i < 0 || at(i) >= tensors_.bytes.size()) throw std::out_of_range("no tensor has this index");
  }
}

std::vector<int64_t> Placer::headroom(const std::vector<int>& indices, int64_t limit_bytes) const {
  check(indices);
  std::vector<int64_t> change(node_count() + 1, 0);
  for (const int i : indices) {
    change[at(tensors_.release_min[at(i)])] += tensors_.bytes[at(i)];
    change[at(tensors_.first_backward[at(i)])] -= tensors_.bytes[at(i)];
  }
  std::vector<int64_t> result(node_count());
  int64_t away = 0;
  for (size_t k = 0; k < node_count(); ++k) {
    away += change[k];
    result[k] = limit_bytes - unswapped_bytes_[k] + away;
  }
  return result;
}

std::vector<int> Placer::releases(std::vector<int> indices, int64_t limit_bytes) const {
  std::sort(indices.begin(), indices.end());
  return choose_releases(indices, headroom(indices, limit_bytes)).nodes;
}

std::optional<Placement> Placer::place(std::vector<int> indices, int64_t limit_bytes, double cutoff_seconds,
                                       double safety_factor, const NotBefore& not_before) const {
  std::sort(indices.begin(), indices.end());
  while (true) {
    std::vector<int64_t> free = headroom(indices, limit_bytes);
    if (std::any_of(free.begin(), free.end(), [](int64_t bytes) { return bytes < 0; })) return std::nullopt;
    Releases released = choose_releases(indices, free);
    std::vector<char> useless(indices.size());
    bool any = false;
    for (size_t j = 0; j < indices.size(); ++j) {
      useless[j] = released.nodes[j] >= tensors_.first_backward[at(indices[j])];
      any |= useless[j] != 0;
    }
    std::vector<int> prefetches;
    if (!any) {
      if (!seconds_.empty() && released.ready.back() + seconds_.back() + overhead(indices) > cutoff_seconds) {
        return std::nullopt;
      }
      prefetches = choose_prefetches(indices, std::move(free), released, safety_factor, not_before);
      for (size_t j = 0; j < indices.size(); ++j) {
        useless[j] = released.nodes[j] >= prefetches[j];
        any |= useless[j] != 0;
      }
    }
    if (!any) return timed(std::move(indices), std::move(released.nodes), std::move(prefetches));
    drop(indices, useless);
  }
}

Placer::Releases Placer::choose_releases(const std::vector<int>& indices, const std::vector<int64_t>& headroom) const {
  const size_t count = indices.size(), nodes = node_count();
  std::vector<int> release_mins(count);
  for (size_t j = 0; j < count; ++j) release_mins[j] = tensors_.release_min[at(indices[j])];
  const std::vector<size_t> by_release_min = sorted_by(release_mins, positions(count));
  Releases result;
  result.nodes.assign(count, static_cast<int>(nodes));
  std::vector<double> out_end(count);
  // Tensors that forward no longer needs and that are not released yet; the first to be copied out comes first.
  std::priority_queue<size_t, std::vector<size_t>, std::greater<size_t>> pending;
  int64_t pending_bytes = 0;
  size_t next_pack = 0, next_pending = 0, remaining = count;
  size_t k = count ? at(tensors_.packed[at(indices[0])]) : nodes;
  result.ready.reserve(nodes);
  result.ready.assign(clock_.begin(), clock_.begin() + static_cast<std::ptrdiff_t>(k));
  double now = clock_[k], channel_free = 0.0;
  while (remaining && k < nodes) {
    for (; next_pending < count && at(release_mins[by_release_min[next_pending]]) == k; ++next_pending) {
      const size_t j = by_release_min[next_pending];
      pending.push(j);
      pending_bytes += tensors_.bytes[at(indices[j])];
    }
    while (!pending.empty()) {
      const size_t j = pending.top();
      if (out_end[j] > now) {
        if (pending_bytes <= headroom[k]) break;
        now = out_end[j];
      }
      pending.pop();
      result.nodes[j] = static_cast<int>(k);
      pending_bytes -= tensors_.bytes[at(indices[j])];
      --remaining;
    }
    result.ready.push_back(now);
    now += seconds_[k];
    for (; next_pack < count && at(tensors_.packed[at(indices[next_pack])]) == k; ++next_pack) {
      channel_free = out_end[next_pack] = std::max(now, channel_free) + tensors_.out_seconds[at(indices[next_pack])];
    }
    ++k;
  }
  const double late = now - clock_[k];
  for (; k < nodes; ++k) result.ready.push_back(clock_[k] + late);
  return result;
}

std::vector<size_t> Placer::by_use(const std::vector<int>& indices) const {
  std::vector<int> ranks(indices.size());
  for (size_t j = 0; j < indices.size(); ++j) ranks[j] = tensors_.copy_in_rank[at(indices[j])];
  return sorted_by(ranks, positions(indices.size()));
}

std::vector<int> Placer::choose_prefetches(const std::vector<int>& indices, std::vector<int64_t> free,
                                           const Releases& released, double safety_factor,
                                           const NotBefore& not_before) const {
  std::vector<int64_t> change(node_count() + 1, 0);
  for (size_t j = 0; j < indices.size(); ++j) {
    change[at(tensors_.release_min[at(indices[j])])] += tensors_.bytes[at(indices[j])];
    change[at(released.nodes[j])] -= tensors_.bytes[at(indices[j])];
  }
  int64_t kept = 0;
  for (size_t k = 0; k < node_count(); ++k) free[k] -= kept += change[k];
  const std::vector<size_t> order = by_use(indices);
  std::vector<double> begins(order.size());  // for each copy-in, the latest start that causes no wait
  double begin = std::numeric_limits<double>::infinity();
  for (size_t rank = order.size(); rank-- > 0;) {
    const size_t i = at(indices[order[rank]]);
    begin = std::min(released.ready[at(tensors_.first_backward[i])], begin) - tensors_.in_seconds[i] * safety_factor;
    begins[rank] = begin;
  }
  std::vector<int> nodes(indices.size());
  const auto ready_begin = released.ready.begin(), ready_end = released.ready.end();
  for (size_t rank = 0; rank < order.size(); ++rank) {
    const size_t j = order[rank], i = at(indices[j]);
    const int use = tensors_.first_backward[i];
    int earliest = released.nodes[j];
    if (const auto found = not_before.find(indices[j]); found != not_before.end()) {
      earliest = std::max(earliest, found->second);
    }
    const int latest = static_cast<int>(std::upper_bound(ready_begin, ready_end, begins[rank]) - ready_begin) - 1;
    const int low = std::min(std::max(latest, earliest), use);
    int k = use;  // memory is reserved backwards from the node before the use, down to `low` or to a node without room
    for (; k > low && free[at(k - 1)] >= tensors_.bytes[i]; --k) free[at(k - 1)] -= tensors_.bytes[i];
    nodes[j] = k;
  }
  return nodes;
}

Placement Placer::timed(std::vector<int> indices, std::vector<int> releases, std::vector<int> prefetches) const {
  const size_t count = indices.size();
  const std::vector<size_t> uses = by_use(indices), by_release = sorted_by(releases, positions(count));
  const std::vector<size_t> by_prefetch = sorted_by(prefetches, uses);
  std::vector<int> nodes;  // those at which a copy begins or may be waited for
  nodes.reserve(4 * count);
  for (size_t j = 0; j < count; ++j) {
    const size_t i = at(indices[j]);
    nodes.insert(nodes.end(), {tensors_.packed[i], releases[j], tensors_.first_backward[i], prefetches[j]});
  }
  std::sort(nodes.begin(), nodes.end());
  nodes.erase(std::unique(nodes.begin(), nodes.end()), nodes.end());
  Placement result;
  std::vector<double> out_end(count), in_end(count);
  size_t next_pack = 0, next_use = 0, next_release = 0, next_prefetch = 0;
  double out_free = 0.0, in_free = 0.0, stalled = 0.0;
  for (const int k : nodes) {
    const double begin = clock_[at(k)] + stalled;
    double now = begin;
    for (; next_release < count && releases[by_release[next_release]] == k; ++next_release) {
      const size_t j = by_release[next_release];
      if (out_end[j] > now) {
        result.stalls.push_back({out_end[j] - now, k, indices[j], true});
        now = out_end[j];
      }
    }
    for (; next_prefetch < count && prefetches[by_prefetch[next_prefetch]] == k; ++next_prefetch) {
      const size_t j = by_prefetch[next_prefetch];
      in_free = in_end[j] = std::max(now, in_free) + tensors_.in_seconds[at(indices[j])];
    }
    for (; next_use < count && tensors_.first_backward[at(indices[uses[next_use]])] == k; ++next_use) {
      const size_t j = uses[next_use];
      if (in_end[j] > now) {
        result.stalls.push_back({in_end[j] - now, k, indices[j], false});
        now = in_end[j];
      }
    }
    stalled += now - begin;
    now += seconds_[at(k)];
    for (; next_pack < count && tensors_.packed[at(indices[next_pack])] == k; ++next_pack) {
      out_free = out_end[next_pack] = std::max(now, out_free) + tensors_.out_seconds[at(indices[next_pack])];
    }
  }
  result.step_seconds = clock_.back() + stalled + overhead(indices);
  result.indices = std::move(indices);
  result.releases = std::move(releases);
  result.prefetches = std::move(prefetches);
  return result;
}

double Placer::overhead(const std::vector<int>& indices) const {
  double sum = 0.0;
  for (const int i : indices) sum += tensors_.overhead_seconds[at(i)];
  return sum;
}

}  // namespace offload
