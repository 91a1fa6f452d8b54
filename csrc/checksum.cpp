#include "checksum.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace offload {
namespace {

constexpr uint32_t kPolynomial = 0x82f63b78U;  // reflected

constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1U) ? kPolynomial : 0U);
    tables[0][byte] = crc;
  }
  for (uint32_t byte = 0; byte < 256; ++byte)
    for (size_t lane = 1; lane < 8; ++lane)
      tables[lane][byte] = (tables[lane - 1][byte] >> 8) ^ tables[0][tables[lane - 1][byte] & 0xff];
  return tables;
}

constexpr auto kTables = make_tables();

uint32_t table_update(uint32_t crc, const uint8_t* data, size_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= crc;
    crc = 0;
    for (size_t lane = 0; lane < 8; ++lane) crc ^= kTables[7 - lane][(word >> (8 * lane)) & 0xff];
  }
  for (; bytes > 0; ++data, --bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 0xff];
  return crc;
}

#if defined(__x86_64__)

// Product of two polynomials modulo P, reflected: bit 31 is x^0.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int bit = 31; bit >= 0; --bit) {
    if (b >> bit & 1U) product ^= a;
    a = (a >> 1) ^ ((a & 1U) ? kPolynomial : 0U);
  }
  return product;
}

constexpr uint32_t power_of_x(size_t exponent) {
  uint32_t result = 0x80000000U;  // x^0
  uint32_t power = 0x40000000U;   // x^1, squared as the exponent is read
  for (; exponent > 0; exponent >>= 1) {
    if (exponent & 1U) result = multiply(result, power);
    power = multiply(power, power);
  }
  return result;
}

// Moves a CRC register over `bytes` bytes of the message: one carry-less multiplication, then one crc32 of the product.
constexpr uint32_t shift_factor(size_t bytes) { return power_of_x(8 * bytes - 33); }

__attribute__((target("sse4.2,pclmul"))) uint64_t shifted(uint64_t crc, uint32_t factor) {
  const __m128i product = _mm_clmulepi64_si128(_mm_cvtsi64_si128(static_cast<long long>(crc)),
                                               _mm_cvtsi32_si128(static_cast<int>(factor)), 0);
  return _mm_crc32_u64(0, static_cast<uint64_t>(_mm_cvtsi128_si64(product)));
}

uint64_t word_at(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, 8);
  return word;
}

// The crc32 instruction has a latency of three cycles and a throughput of one: three independent lanes keep it busy.
// Long lanes let the memory's own prefetching follow them; an odd multiple of a cache line keeps them in different
// sets.
template <size_t kLaneBytes>
__attribute__((target("sse4.2,pclmul"))) uint64_t three_lanes(uint64_t crc, const uint8_t*& data, size_t& bytes) {
  constexpr uint32_t kOneLane = shift_factor(kLaneBytes);
  constexpr uint32_t kTwoLanes = shift_factor(2 * kLaneBytes);
  while (bytes >= 3 * kLaneBytes) {
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t at = 0; at < kLaneBytes; at += 8) {
      crc = _mm_crc32_u64(crc, word_at(data + at));
      second = _mm_crc32_u64(second, word_at(data + at + kLaneBytes));
      third = _mm_crc32_u64(third, word_at(data + at + 2 * kLaneBytes));
    }
    crc = shifted(crc, kTwoLanes) ^ shifted(second, kOneLane) ^ third;
    data += 3 * kLaneBytes;
    bytes -= 3 * kLaneBytes;
  }
  return crc;
}

__attribute__((target("sse4.2,pclmul"))) uint32_t hardware_update(uint32_t start, const uint8_t* data, size_t bytes) {
  uint64_t crc = three_lanes<65600>(start, data, bytes);
  crc = three_lanes<4160>(crc, data, bytes);
  crc = three_lanes<320>(crc, data, bytes);
  for (; bytes >= 8; data += 8, bytes -= 8) crc = _mm_crc32_u64(crc, word_at(data));
  auto narrow = static_cast<uint32_t>(crc);
  for (; bytes > 0; ++data, --bytes) narrow = _mm_crc32_u8(narrow, *data);
  return narrow;
}

// Multiplies a 128-bit remainder by x^bits: a reflected 64 × 64 product comes out multiplied by x, hence the − 1.
constexpr long long fold_low(size_t bits) { return static_cast<long long>(uint64_t{power_of_x(bits + 64 - 1)} << 32); }
constexpr long long fold_high(size_t bits) { return static_cast<long long>(uint64_t{power_of_x(bits - 1)} << 32); }

__attribute__((target("avx2,vpclmulqdq"))) inline __m256i folded(__m256i remainder, __m256i factors, __m256i next) {
  const __m256i low = _mm256_clmulepi64_epi128(remainder, factors, 0x00);
  const __m256i high = _mm256_clmulepi64_epi128(remainder, factors, 0x11);
  return _mm256_xor_si256(_mm256_xor_si256(low, high), next);
}

__attribute__((target("avx2"))) inline __m256i load(const uint8_t* data) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(data));
}

// Eight 128-bit remainders, 128 bytes a turn: limited by memory where the machine has it.
__attribute__((target("sse4.2,pclmul,avx2,vpclmulqdq"))) uint32_t folding_update(uint32_t start, const uint8_t* data,
                                                                                 size_t bytes) {
  if (bytes < 256) return hardware_update(start, data, bytes);
  const __m256i by_1024 = _mm256_set_epi64x(fold_high(1024), fold_low(1024), fold_high(1024), fold_low(1024));
  const __m256i by_256 = _mm256_set_epi64x(fold_high(256), fold_low(256), fold_high(256), fold_low(256));
  __m256i first = _mm256_xor_si256(load(data), _mm256_set_epi64x(0, 0, 0, start));
  __m256i second = load(data + 32);
  __m256i third = load(data + 64);
  __m256i fourth = load(data + 96);
  for (data += 128, bytes -= 128; bytes >= 128; data += 128, bytes -= 128) {
    first = folded(first, by_1024, load(data));
    second = folded(second, by_1024, load(data + 32));
    third = folded(third, by_1024, load(data + 64));
    fourth = folded(fourth, by_1024, load(data + 96));
  }
  const __m256i all = folded(folded(folded(first, by_256, second), by_256, third), by_256, fourth);
  alignas(32) uint64_t words[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(words), all);
  uint64_t crc = 0;
  for (const uint64_t word : words) crc = _mm_crc32_u64(crc, word);
  return hardware_update(static_cast<uint32_t>(crc), data, bytes);
}

using Update = uint32_t (*)(uint32_t, const uint8_t*, size_t);

Update best_update() {
  if (!__builtin_cpu_supports("sse4.2") || !__builtin_cpu_supports("pclmul")) return table_update;
  const bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq");
  return wide ? folding_update : hardware_update;
}

#else

using Update = uint32_t (*)(uint32_t, const uint8_t*, size_t);

Update best_update() { return table_update; }

#endif

}  // namespace

uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes) {
  return ~table_update(~crc, static_cast<const uint8_t*>(data), bytes);
}

uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) {
  static const Update update = best_update();
  return ~update(~crc, static_cast<const uint8_t*>(data), bytes);
}

}  // namespace offload
