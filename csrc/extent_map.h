// Allocates ranges of a linear space (the bytes of a slab or of a file): best fit, and adjacent free ranges are joined.
//
// It only stores which ranges are free, and never accesses the space itself. Not thread safe; its owner locks. All
// offsets and lengths are multiples of the granule given at construction, to which requests are rounded up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>

namespace offload {

class ExtentMap {
 public:
  explicit ExtentMap(uint64_t granule_bytes) : granule_(granule_bytes) {}

  uint64_t round_up(uint64_t bytes) const { return (bytes + granule_ - 1) / granule_ * granule_; }

  // Adds [offset, offset + bytes) as free space.
  void grow(uint64_t offset, uint64_t bytes);
  // Allocates from the smallest free range that fits `bytes` rounded up. Returns the offset; nullopt if none fits.
  std::optional<uint64_t> allocate(uint64_t bytes);
  // Frees a range that allocate returned for `bytes`. May throw std::bad_alloc if neither adjacent range is free; then
  // nothing has changed.
  void release(uint64_t offset, uint64_t bytes);

  // Removes the free range that ends at `end` from the space. Returns its length, 0 if there is none.
  uint64_t cut_tail(uint64_t end);

  uint64_t free_bytes() const { return free_bytes_; }
  uint64_t largest_free_bytes() const { return by_length_.empty() ? 0 : by_length_.rbegin()->first; }

 private:
  using Range = std::map<uint64_t, uint64_t>::iterator;

  void insert(uint64_t offset, uint64_t bytes);
  void change(Range range, uint64_t offset, uint64_t bytes);
  void erase(Range range);

  uint64_t granule_;
  uint64_t free_bytes_ = 0;
  std::map<uint64_t, uint64_t> by_offset_;
  std::set<std::pair<uint64_t, uint64_t>> by_length_;
};

}  // namespace offload
