// The spill file's I/O with faults: the N-th operation of a kind from now on fails, moves too little or reads a wrong
// block.
//
// A short write is really short: what it says is missing is overwritten in the file, and a short read scribbles over
// the memory that it says it has not filled.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <random>
#include <system_error>
#include <thread>

#include "checksum.h"
#include "file_io.h"

namespace offload::faults {

enum class Operation { allocate, write, read };
enum class Kind { error, short_transfer, wrong_block };

struct Fault {
  Operation operation = Operation::write;
  Kind kind = Kind::error;
  uint64_t nth = 1;  // 1: the next of its operation; 0: none
  int error_number = 0;
  bool persistent = false;  // it stays
};

constexpr Fault kNone{Operation::write, Kind::error, 0, 0, false};

class FaultyIo final : public FileIo {
 public:
  // Transfers pause for up to this long before they are said to be done, so that more happens meanwhile.
  inline static std::atomic<unsigned> pause_us_max{0};

  void inject(const Fault& fault) {
    const std::lock_guard lock(mutex_);
    fault_ = fault;
  }

  int allocate(int descriptor, uint64_t offset, uint64_t bytes) override {
    const int error_number = FileIo::allocate(descriptor, offset, bytes);
    const Fault fault = due(Operation::allocate);
    return fault.nth > 0 && fault.kind == Kind::error ? fault.error_number : error_number;
  }

  int64_t transfer(int descriptor, const FileTransfer& transfer) override {
    pause();
    return tamper(descriptor, transfer, FileIo::transfer(descriptor, transfer));
  }

  int64_t wait(int descriptor, const FileTransfer& transfer, size_t slot) override {
    const int64_t result = FileIo::wait(descriptor, transfer, slot);
    pause();
    return result == 0 ? 0 : tamper(descriptor, transfer, result);
  }

 private:
  static constexpr size_t kSectorBytes = 4096;
  static constexpr char kScribble = static_cast<char>(0xDB);

  // The fault that this operation meets; its nth is 0 where there is none.
  Fault due(Operation operation) {
    const std::lock_guard lock(mutex_);
    if (fault_.nth == 0 || fault_.operation != operation) return kNone;
    if (fault_.nth > 1) return --fault_.nth, kNone;
    const Fault fault = fault_;
    if (!fault.persistent) fault_ = kNone;
    return fault;
  }

  int64_t tamper(int descriptor, const FileTransfer& transfer, int64_t result) {
    const Fault fault = due(transfer.writing ? Operation::write : Operation::read);
    if (fault.nth == 0) return result;
    if (fault.kind == Kind::error) return -fault.error_number;
    if (result <= 0) return result;
    const auto moved = static_cast<size_t>(result);
    if (fault.kind == Kind::short_transfer) {
      const size_t kept = std::min(moved, (moved / 2 + kSectorBytes - 1) / kSectorBytes * kSectorBytes);
      if (!transfer.writing) std::memset(transfer.data + kept, kScribble, moved - kept);
      if (transfer.writing) scribble(descriptor, transfer.offset + kept, moved - kept);
      return result / 2;
    }
    if (!transfer.writing) {
      // A block in the middle. A transfer that continues a short one may be within a block, where perhaps no byte is
      // checked: it fails.
      const size_t first = (kBlockBytes - transfer.offset % kBlockBytes) % kBlockBytes;
      if (first >= moved) return -EIO;
      const size_t block = first + (moved - first) / 2 / kBlockBytes * kBlockBytes;
      for (size_t at = block; at < std::min(moved, block + kBlockBytes); ++at) transfer.data[at] ^= 1;
    }
    return result;
  }

  // Whole sectors, as direct I/O wants them.
  static void scribble(int descriptor, uint64_t offset, uint64_t bytes) {
    alignas(kSectorBytes) std::array<char, kSectorBytes> junk;
    junk.fill(kScribble);
    for (uint64_t at = 0; at + kSectorBytes <= bytes; at += kSectorBytes)
      if (pwrite(descriptor, junk.data(), kSectorBytes, static_cast<off_t>(offset + at)) < 0)
        throw std::system_error(errno, std::generic_category(), "cannot scribble");
  }

  static void pause() {
    const unsigned most_us = pause_us_max;
    if (most_us == 0) return;
    thread_local std::minstd_rand random(std::random_device{}());
    std::this_thread::sleep_for(std::chrono::microseconds(random() % most_us));
  }

  std::mutex mutex_;
  Fault fault_ = kNone;
};

}  // namespace offload::faults
