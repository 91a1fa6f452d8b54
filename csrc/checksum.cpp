#include "checksum.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
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
    for (size_t place = 1; place < 8; ++place)
      tables[place][byte] = (tables[place - 1][byte] >> 8) ^ tables[0][tables[place - 1][byte] & 0xff];
  return tables;
}

constexpr auto kTables = make_tables();

uint32_t table_update(uint32_t crc, const uint8_t* data, size_t bytes) {
  for (; bytes >= 8; data += 8, bytes -= 8) {
    uint64_t word;
    std::memcpy(&word, data, 8);
    word ^= crc;
    crc = 0;
    for (size_t place = 0; place < 8; ++place) crc ^= kTables[7 - place][(word >> (8 * place)) & 0xff];
  }
  for (; bytes > 0; ++data, --bytes) crc = (crc >> 8) ^ kTables[0][(crc ^ *data) & 0xff];
  return crc;
}

#if defined(__x86_64__) || defined(__aarch64__)

// Product of two polynomials modulo that of `kPolynomial`, reflected: bit 31 is x^0.
constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (int bit = 31; bit >= 0; --bit) {
    product ^= a & (0U - (b >> bit & 1U));
    a = (a >> 1) ^ (kPolynomial & (0U - (a & 1U)));
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

uint64_t word_at(const uint8_t* data) {
  uint64_t word;
  std::memcpy(&word, data, 8);
  return word;
}

#if defined(__x86_64__)
#define OFFLOAD_CRC_TARGET __attribute__((target("sse4.2")))
using Register = uint64_t;  // type of the instruction's operand and result
OFFLOAD_CRC_TARGET inline Register add_word(Register crc, uint64_t word) { return _mm_crc32_u64(crc, word); }
OFFLOAD_CRC_TARGET inline Register add_byte(Register crc, uint8_t byte) {
  return _mm_crc32_u8(static_cast<uint32_t>(crc), byte);
}
#else
#define OFFLOAD_CRC_TARGET
using Register = uint32_t;
// Assembly, because compilers differ in whether a build for the baseline processor may use the intrinsics.
inline Register add_word(Register crc, uint64_t word) {
  asm(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
  return crc;
}
inline Register add_byte(Register crc, uint8_t byte) {
  asm(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"(uint32_t{byte}));
  return crc;
}
#endif

// The crc32 instruction has a latency of three cycles and a throughput of one: three independent lanes keep it busy.
// Long lanes let the hardware prefetcher follow them; an odd multiple of a cache line keeps them in different sets.
template <size_t kLaneBytes>
OFFLOAD_CRC_TARGET Register three_lanes(Register crc, const uint8_t*& data, size_t& bytes) {
  constexpr uint32_t kOneLane = power_of_x(8 * kLaneBytes);  // moves a register over one lane of the message
  constexpr uint32_t kTwoLanes = power_of_x(16 * kLaneBytes);
  while (bytes >= 3 * kLaneBytes) {
    Register second = 0;
    Register third = 0;
    for (size_t at = 0; at < kLaneBytes; at += 8) {
      crc = add_word(crc, word_at(data + at));
      second = add_word(second, word_at(data + at + kLaneBytes));
      third = add_word(third, word_at(data + at + 2 * kLaneBytes));
    }
    crc = multiply(static_cast<uint32_t>(crc), kTwoLanes) ^ multiply(static_cast<uint32_t>(second), kOneLane) ^ third;
    data += 3 * kLaneBytes;
    bytes -= 3 * kLaneBytes;
  }
  return crc;
}

OFFLOAD_CRC_TARGET uint32_t lanes_update(uint32_t start, const uint8_t* data, size_t bytes) {
  Register crc = three_lanes<65600>(start, data, bytes);
  crc = three_lanes<4160>(crc, data, bytes);
  crc = three_lanes<1088>(crc, data, bytes);
  for (; bytes >= 8; data += 8, bytes -= 8) crc = add_word(crc, word_at(data));
  for (; bytes > 0; ++data, --bytes) crc = add_byte(crc, *data);
  return static_cast<uint32_t>(crc);
}

#endif

#if defined(__x86_64__)

// Factors that multiply a 128-bit remainder by x^bits. A reflected 64 × 64 product already includes a factor x: so − 1.
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

// Folds into eight 128-bit remainders, 128 bytes per iteration: as fast as memory.
__attribute__((target("sse4.2,pclmul,avx2,vpclmulqdq"))) uint32_t folding_update(uint32_t start, const uint8_t* data,
                                                                                 size_t bytes) {
  if (bytes < 256) return lanes_update(start, data, bytes);
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
  return lanes_update(static_cast<uint32_t>(crc), data, bytes);
}

#endif

// Where the second checked line of a block begins: any line but the first. At no distance up to 4,096 blocks do more
// than 2.5 % of the pairs have the same line. (A multiplication alone does not mix enough: at some distances nearly all pairs had.)
// The constants are those of MurmurHash3's 64-bit finalizer.
uint64_t second_line(uint64_t block) {
  uint64_t mixed = (block ^ block >> 33) * 0xff51afd7ed558ccdU;
  mixed = (mixed ^ mixed >> 33) * 0xc4ceb9fe1a85ec53U;
  return (1 + ((mixed ^ mixed >> 33) >> 32) % (kBlockBytes / kLineBytes - 1)) * kLineBytes;
}

#if defined(__x86_64__) || defined(__aarch64__)

// Both lines of each whole block from number `first` up to `end`; `data` points to the first of these blocks. Each line is
// prefetched eight blocks ahead: lines are in different pages, so the processor would not load them before they are used.
OFFLOAD_CRC_TARGET uint32_t instruction_blocks(uint32_t start, const uint8_t* data, uint64_t first, uint64_t end) {
  constexpr uint64_t kAhead = 8;
  const auto block_at = [=](uint64_t block) { return data + (block - first) * kBlockBytes; };
  Register crc = start;
  for (uint64_t block = first; block < end; ++block) {
    const uint64_t next = std::min(block + kAhead, end - 1);
    __builtin_prefetch(block_at(next));
    __builtin_prefetch(block_at(next) + second_line(next));
    for (const uint8_t* line : {block_at(block), block_at(block) + second_line(block)})
      for (size_t at = 0; at < kLineBytes; at += 8) crc = add_word(crc, word_at(line + at));
  }
  return static_cast<uint32_t>(crc);
}

#endif

uint32_t table_blocks(uint32_t crc, const uint8_t* data, uint64_t first, uint64_t end) {
  for (uint64_t block = first; block < end; ++block, data += kBlockBytes) {
    crc = table_update(crc, data, kLineBytes);
    crc = table_update(crc, data + second_line(block), kLineBytes);
  }
  return crc;
}

using Update = uint32_t (*)(uint32_t, const uint8_t*, size_t);

struct Kernels {
  Update bytes;
  uint32_t (*blocks)(uint32_t, const uint8_t*, uint64_t, uint64_t);
};

Kernels best_kernels() {
#if defined(__x86_64__)
  const bool has_lanes = __builtin_cpu_supports("sse4.2");
  if (has_lanes && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("vpclmulqdq"))
    return {folding_update, instruction_blocks};
  if (has_lanes) return {lanes_update, instruction_blocks};
#elif defined(__aarch64__)
  if (getauxval(AT_HWCAP) & HWCAP_CRC32) return {lanes_update, instruction_blocks};
#endif
  return {table_update, table_blocks};
}

const Kernels& kernels() {
  static const Kernels best = best_kernels();
  return best;
}

// The checked lines of the bytes from `begin` up to `end` of a file, which contain no whole block. `data` points to the
// first of these bytes.
uint32_t partial_blocks(uint32_t crc, const uint8_t* data, uint64_t begin, uint64_t end) {
  for (uint64_t block = begin / kBlockBytes; block * kBlockBytes < end; ++block) {
    for (const uint64_t line : {block * kBlockBytes, block * kBlockBytes + second_line(block)}) {
      const uint64_t from = std::max(line, begin);
      const uint64_t to = std::min(line + kLineBytes, end);
      if (from < to) crc = kernels().bytes(crc, data + (from - begin), to - from);
    }
  }
  return crc;
}

}  // namespace

uint32_t crc32c_portable(uint32_t crc, const void* data, size_t bytes) {
  return ~table_update(~crc, static_cast<const uint8_t*>(data), bytes);
}

uint32_t crc32c(uint32_t crc, const void* data, size_t bytes) {
  return ~kernels().bytes(~crc, static_cast<const uint8_t*>(data), bytes);
}

uint32_t crc32c_of_blocks(uint32_t crc, const void* data, size_t bytes, uint64_t offset) {
  const auto* const begin = static_cast<const uint8_t*>(data);
  const uint64_t end = offset + bytes;
  const uint64_t first = (offset + kBlockBytes - 1) / kBlockBytes;
  const uint64_t last = end / kBlockBytes;  // whole blocks: from `first` up to `last`
  if (first >= last) return ~partial_blocks(~crc, begin, offset, end);
  const size_t head = first * kBlockBytes - offset;
  const size_t tail_at = last * kBlockBytes - offset;
  crc = partial_blocks(~crc, begin, offset, offset + head);
  crc = kernels().blocks(crc, begin + head, first, last);
  return ~partial_blocks(crc, begin + tail_at, offset + tail_at, end);
}

}  // namespace offload
