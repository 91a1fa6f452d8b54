// CRC32C (Castagnoli) of the bytes that go to disk, verified when they are read back.
//
// x86-64 processors with vpclmulqdq: wide carry-less folding, close to memory speed. Other x86-64 processors, and
// aarch64: three interleaved streams of the crc32 instruction. Without that instruction: tables. The value is the same
// on every machine. Thread safe; no state.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload {

// Continues `crc` (0 to begin) over `bytes` bytes at `data`.
uint32_t crc32c(uint32_t crc, const void* data, size_t bytes);

// The portable version, exposed so that tests can compare the two.
uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes);

}  // namespace offload
