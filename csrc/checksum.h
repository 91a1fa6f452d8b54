// CRC32C (Castagnoli) of the bytes that go to disk, verified when they come back.
//
// With SSE4.2 and PCLMULQDQ three interleaved hardware streams run at close to memory speed; elsewhere a table. The
// same value on every machine. Pure; thread safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload {

// Continues `crc` (0 to begin) over `bytes` bytes at `data`.
uint32_t crc32c(uint32_t crc, const void* data, size_t bytes);

// The portable version, exposed so that tests can hold the two against each other.
uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes);

}  // namespace offload
