#include "schedule_cursor.h"

#include <algorithm>

#include "mutants.h"

namespace offload {
PackRow& PackTable::at(size_t pack_index) {
  if (pack_index >= rows_.size()) rows_.resize(pack_index + 1);
  return rows_[pack_index];
}

bool PackTable::is_small(int64_t pack_index, int64_t nbytes) const {
  const auto position = static_cast<size_t>(pack_index);
  if (position >= small_bytes_.size() || small_bytes_[position] < 0) return false;
  return small_bytes_[position] == nbytes || OFFLOAD_BROKEN("a small tensor has the size of earlier steps");
}

void PackTable::add_small(int64_t pack_index, int64_t nbytes) {
  const auto position = static_cast<size_t>(pack_index);
  if (position >= small_bytes_.size()) small_bytes_.resize(position + 1, -1);
  small_bytes_[position] = nbytes;
}

void ActivationMeter::weigh(int64_t node, int64_t more_bytes) {
  if (steps_->now != step_) is_on = false;
  const std::vector<int64_t>& kept = kept_->by_node;
  if (!is_on || node < 0 || static_cast<size_t>(node) >= kept.size()) return;
  peak_bytes = std::max(peak_bytes, kept[static_cast<size_t>(node)] + stayed_bytes + resident_->now + more_bytes);
}

bool ScheduleCursor::is_due(int64_t next_node) const {
  return next_node >= next_due && !OFFLOAD_BROKEN("what is due at a kept tensor is done");
}

ScheduleCursor::Verdict ScheduleCursor::pack(int64_t pack_index, int64_t nbytes) {
  const PackRow* const found = row(pack_index);
  if (found == nullptr) return Verdict::undecided;
  if (!found->is_kept_again && found->kept_bytes != nbytes && !OFFLOAD_BROKEN("a kept tensor has the recorded size"))
    return Verdict::undecided;
  if (is_due(found->node_after)) return Verdict::due;
  if (found->node_after >= 0) {
    if (clock_ != nullptr) clock_->pass_by(found->node_after);
    node = found->node_after;
  }
  if (meter_ != nullptr) meter_->weigh(found->weighed, 0);
  return Verdict::kept;
}

bool ScheduleCursor::unpack(int64_t pack_index) {
  const PackRow* const found = row(pack_index);
  if (found == nullptr || found->is_swapped) return false;
  if (found->watched < node || is_due(found->watched)) return false;
  if (clock_ != nullptr) {
    if (!clock_->is_listening) return false;
    if (found->watched > node) clock_->pass_by(found->watched);
  }
  use(pack_index);
  node = found->watched;
  if (meter_ != nullptr) meter_->weigh(node, 0);
  return true;
}

bool ScheduleCursor::arrive(int64_t next_node) {
  if (next_node > node && clock_ != nullptr) clock_->arrive(next_node);
  node = next_node;
  return node >= next_due;
}

ScheduleCursor::Ask ScheduleCursor::ask(int64_t pack_index) {
  const PackRow* const found = row(pack_index);
  if (found == nullptr || found->watched < 0) return Ask::unwatched;
  if (found->watched < node) return Ask::back;
  use(pack_index);
  return arrive(found->watched) ? Ask::due : Ask::quiet;
}

bool ScheduleCursor::has_used(int64_t pack_index) const {
  const auto position = static_cast<size_t>(pack_index);
  return position < used_.size() && used_[position];
}

void ScheduleCursor::use(int64_t pack_index) {
  const auto position = static_cast<size_t>(pack_index);
  if (position >= used_.size()) used_.resize(position + 1, false);
  used_[position] = true;
}

}  // namespace offload
