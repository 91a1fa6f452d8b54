// The system calls under the spill file: its growth, and transfers of bytes one by one or several at a time.
//
// Virtual, so that a test can put faults between the spill file and the kernel (tests/faults). Thread safe: transfers
// that have been started belong to the calling thread, which has an AIO context of its own.
#pragma once

#include <cstddef>
#include <cstdint>

namespace offload {

struct FileTransfer {
  bool writing = false;
  char* data = nullptr;
  size_t bytes = 0;
  uint64_t offset = 0;
};

class FileIo {
 public:
  static constexpr size_t kSlots = 32;  // transfers that a thread may have started

  FileIo() = default;
  virtual ~FileIo() = default;
  FileIo(const FileIo&) = delete;
  FileIo& operator=(const FileIo&) = delete;

  // Allocates space for [offset, offset + bytes). Returns 0 or errno.
  virtual int allocate(int descriptor, uint64_t offset, uint64_t bytes);
  // Returns the bytes moved, or −errno.
  virtual int64_t transfer(int descriptor, const FileTransfer& transfer);
  // Starts `count` transfers in the slots from `slot` on. Returns how many have been started, the first ones; 0 where
  // the kernel has no AIO.
  virtual size_t start(int descriptor, const FileTransfer* transfers, size_t count, size_t slot);
  // Waits for the transfer that has been started in `slot`. Returns the bytes moved, or −errno.
  virtual int64_t wait(int descriptor, const FileTransfer& transfer, size_t slot);
  // Waits for all that this thread has started: afterwards the kernel no longer touches the caller's memory.
  virtual void drain() noexcept;
};

}  // namespace offload
