// The part of Linux AIO that the spill file uses: transfers are submitted together and waited for one by one.
#pragma once

#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "file_io.h"

namespace offload {

// One kernel AIO context, used by one thread. If the kernel refuses to create it, valid() is false.
class AioQueue {
 public:
  AioQueue() {
    if (syscall(SYS_io_setup, FileIo::kSlots, &context_) != 0) context_ = 0;
  }
  ~AioQueue() {
    if (context_ != 0) syscall(SYS_io_destroy, context_);
  }
  AioQueue(const AioQueue&) = delete;
  AioQueue& operator=(const AioQueue&) = delete;

  bool valid() const { return context_ != 0; }

  // Submits `count` transfers in one system call. Returns how many the kernel has accepted: these are the first ones.
  size_t submit(int descriptor, const FileTransfer* transfers, size_t count, size_t first_slot) {
    std::array<iocb*, FileIo::kSlots> list{};
    for (size_t each = 0; each < count; ++each) {
      const FileTransfer& transfer = transfers[each];
      const size_t slot = first_slot + each;
      iocb& block = blocks_[slot];
      std::memset(&block, 0, sizeof block);
      block.aio_data = slot;
      block.aio_lio_opcode = transfer.writing ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
      block.aio_fildes = static_cast<uint32_t>(descriptor);
      block.aio_buf = reinterpret_cast<uint64_t>(transfer.data);
      block.aio_nbytes = transfer.bytes;
      block.aio_offset = static_cast<int64_t>(transfer.offset);
      done_[slot] = false;
      list[each] = &block;
    }
    const long taken = syscall(SYS_io_submit, context_, static_cast<long>(count), list.data());
    if (taken <= 0) return 0;
    in_flight_ += static_cast<size_t>(taken);
    return static_cast<size_t>(taken);
  }

  int64_t wait(size_t slot) {
    while (!done_[slot]) reap();
    return results_[slot];
  }

  void drain() {
    while (in_flight_ > 0) reap();
  }

 private:
  void reap() {
    io_event event;
    if (syscall(SYS_io_getevents, context_, 1L, 1L, &event, nullptr) != 1) return;
    results_[event.data] = event.res;
    done_[event.data] = true;
    --in_flight_;
  }

  aio_context_t context_ = 0;
  size_t in_flight_ = 0;
  std::array<iocb, FileIo::kSlots> blocks_{};
  std::array<int64_t, FileIo::kSlots> results_{};
  std::array<bool, FileIo::kSlots> done_{};
};

}  // namespace offload
