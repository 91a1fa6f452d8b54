// CRC32C (Castagnoli) of the bytes that go to disk, verified when they come back.
//
// By wide carry-less folding where the processor has it (close to memory speed), else by three interleaved streams of
// the crc32 instruction, else by table: the same value on every machine. Pure; thread safe.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload {

// Continues `crc` (0 to begin) over `bytes` bytes at `data`.
uint32_t crc32c(uint32_t crc, const void* data, size_t bytes);

// The portable version, exposed so that tests can hold the two against each other.
uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes);

}  // namespace offload
