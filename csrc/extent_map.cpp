#include "extent_map.h"

#include <iterator>
#include <stdexcept>

namespace offload {

void ExtentMap::insert(uint64_t offset, uint64_t bytes) {
  by_offset_.emplace(offset, bytes);
  by_length_.emplace(bytes, offset);
  free_bytes_ += bytes;
}

void ExtentMap::erase(std::map<uint64_t, uint64_t>::iterator range) {
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
  erase(by_offset_.find(offset));
  if (length > wanted) insert(offset + wanted, length - wanted);
  return offset;
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
  uint64_t begin = offset;
  uint64_t end = offset + round_up(bytes == 0 ? 1 : bytes);
  auto next = by_offset_.lower_bound(begin);
  if (next != by_offset_.end() && next->first < end) throw std::logic_error("extent released twice");
  if (next != by_offset_.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second > begin) throw std::logic_error("extent released twice");
    if (before->first + before->second == begin) {
      begin = before->first;
      erase(before);
    }
  }
  if (next != by_offset_.end() && next->first == end) {
    end += next->second;
    erase(next);
  }
  insert(begin, end - begin);
}

}  // namespace offload
