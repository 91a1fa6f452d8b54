// CRC32C (Castagnoli) of bytes that go to disk, verified when they are read back.
//
// By default it covers two cache lines of each 4 KiB block of a file (`crc32c_of_blocks`); with OFFLOAD_CHECKSUM=all,
// every byte (`crc32c`). Disks and links detect most wrong bits themselves. They do not detect lost, stale or misplaced
// blocks; two lines do, unless the wrong block has the right bytes in both. A checksum of every byte takes most of the
// processor time of a copy: it reads the whole tensor through the caches, which direct I/O does not.
//
// x86-64 processors with vpclmulqdq: wide carry-less folding, close to memory speed. Other x86-64 processors, and
// aarch64: three interleaved lanes of the crc32 instruction. Without that instruction: tables. Of blocks: the same
// instruction, one word after the other, and lines are prefetched; or tables. The value is the same on every
// little-endian machine. Thread safe; no state.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload {

// Continues `crc` (0 to begin) over `bytes` bytes at `data`.
uint32_t crc32c(uint32_t crc, const void* data, size_t bytes);

constexpr uint64_t kBlockBytes = 4096;  // what file systems write at once
constexpr uint64_t kLineBytes = 64;     // size of a cache line

// Continues `crc` over two cache lines of each block of a file: the first one, and one whose place depends on the number
// of the block, so that rows of whole blocks are not all checked at the same column. The `bytes` bytes at `data` are at
// `offset` in the file. The result does not depend on how a range of the file is divided into calls.
uint32_t crc32c_of_blocks(uint32_t crc, const void* data, size_t bytes, uint64_t offset);

// The version with tables, exposed so that tests can compare `crc32c` with it.
uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes);

}  // namespace offload
