// The system calls of the spill file: its growth, and transfers of bytes, one by one or several at a time.
//
// The methods are virtual, so that a test can inject faults (tests/faults). Thread safe: started transfers belong to
// the calling thread, which has its own AIO context.
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
  static constexpr size_t kSlots = 32;  // most transfers that a thread may have in flight

  FileIo() = default;
  virtual ~FileIo() = default;
  FileIo(const FileIo&) = delete;
  FileIo& operator=(const FileIo&) = delete;

  // Allocates space for [offset, offset + bytes). Returns 0 or errno.
  virtual int allocate(int descriptor, uint64_t offset, uint64_t bytes);
  // Returns the bytes moved, or −errno.
  virtual int64_t transfer(int descriptor, const FileTransfer& transfer);
  // Starts `count` transfers in the slots from `slot` on. Returns how many have been started: these are the first ones.
  // Returns 0 if the kernel has no AIO.
  virtual size_t start(int descriptor, const FileTransfer* transfers, size_t count, size_t slot);
  // Waits for the transfer that was started in `slot`. Returns the bytes moved, or −errno.
  virtual int64_t wait(int descriptor, const FileTransfer& transfer, size_t slot);
  // Waits for all transfers that this thread has started: the kernel then no longer accesses the caller's memory.
  virtual void drain() noexcept;
};

}  // namespace offload
