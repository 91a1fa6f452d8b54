#include "extent_map.h"

#include <iterator>
#include <stdexcept>

namespace offload {

void ExtentMap::insert(uint64_t offset, uint64_t bytes) {
  const Range range = by_offset_.emplace(offset, bytes).first;
  try {
    by_length_.emplace(bytes, offset);
  } catch (...) {
    by_offset_.erase(range);
    throw;
  }
  free_bytes_ += bytes;
}

// Allocates no memory.
void ExtentMap::change(Range range, uint64_t offset, uint64_t bytes) {
  auto by_length = by_length_.extract({range->second, range->first});
  auto by_offset = by_offset_.extract(range);
  free_bytes_ += bytes - by_offset.mapped();
  by_length.value() = {bytes, offset};
  by_offset.key() = offset;
  by_offset.mapped() = bytes;
  by_length_.insert(std::move(by_length));
  by_offset_.insert(std::move(by_offset));
}

void ExtentMap::erase(Range range) {
  by_length_.erase({range->second, range->first});
  free_bytes_ -= range->second;
  by_offset_.erase(range);
}

void ExtentMap::grow(uint64_t offset, uint64_t bytes) { release(offset, bytes); }

std::optional<uint64_t> ExtentMap::allocate(uint64_t bytes) {
  const uint64_t wanted = round_up(bytes == 0 ? 1 : bytes);
  auto fit = by_length_.lower_bound({wanted, 0});
  if (fit == by_length_.end()) return std::nullopt;
  const auto [length, offset] = *fit;
  const uint64_t begin = offset;
  if (length > wanted) {
    change(by_offset_.find(begin), begin + wanted, length - wanted);
  } else {
    erase(by_offset_.find(begin));
  }
  return begin;
}

uint64_t ExtentMap::cut_tail(uint64_t end) {
  if (by_offset_.empty()) return 0;
  const auto last = std::prev(by_offset_.end());
  const uint64_t bytes = last->second;
  if (last->first + bytes != end) return 0;
  erase(last);
  return bytes;
}

void ExtentMap::release(uint64_t offset, uint64_t bytes) {
  uint64_t end = offset + round_up(bytes == 0 ? 1 : bytes);
  const Range next = by_offset_.lower_bound(offset);
  const Range before = next == by_offset_.begin() ? by_offset_.end() : std::prev(next);
  const bool has_before = before != by_offset_.end();
  if ((next != by_offset_.end() && next->first < end) || (has_before && before->first + before->second > offset))
    throw std::logic_error("extent released twice");
  const bool joins_before = has_before && before->first + before->second == offset;
  const bool joins_next = next != by_offset_.end() && next->first == end;
  if (joins_next) end += next->second;
  if (joins_before) {
    if (joins_next) erase(next);
    change(before, before->first, end - before->first);
  } else if (joins_next) {
    change(next, offset, end - offset);
  } else {
    insert(offset, end - offset);
  }
}

}  // namespace offload
