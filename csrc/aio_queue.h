// Linux AIO as far as the spill file needs it: transfers that are submitted together and waited for one by one.
#pragma once

#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace offload {

// One kernel AIO context, used by one transfer at a time. A context that the kernel refuses leaves valid() false.
class AioQueue {
 public:
  static constexpr size_t kDepth = 32;

  AioQueue() {
    if (syscall(SYS_io_setup, kDepth, &context_) != 0) context_ = 0;
  }
  ~AioQueue() {
    if (context_ != 0) syscall(SYS_io_destroy, context_);
  }
  AioQueue(const AioQueue&) = delete;
  AioQueue& operator=(const AioQueue&) = delete;

  bool valid() const { return context_ != 0; }

  bool submit(size_t slot, int descriptor, bool writing, char* data, size_t bytes, uint64_t offset) {
    prepare(slot, descriptor, writing, data, bytes, offset);
    return submit_prepared(slot, 1) == 1;
  }

  void prepare(size_t slot, int descriptor, bool writing, char* data, size_t bytes, uint64_t offset) {
    iocb& block = blocks_[slot];
    std::memset(&block, 0, sizeof block);
    block.aio_data = slot;
    block.aio_lio_opcode = writing ? IOCB_CMD_PWRITE : IOCB_CMD_PREAD;
    block.aio_fildes = static_cast<uint32_t>(descriptor);
    block.aio_buf = reinterpret_cast<uint64_t>(data);
    block.aio_nbytes = bytes;
    block.aio_offset = static_cast<int64_t>(offset);
    done_[slot] = false;
  }

  // In one system call; returns how many of them the kernel took.
  size_t submit_prepared(size_t first_slot, size_t count) {
    std::array<iocb*, kDepth> list{};
    for (size_t each = 0; each < count; ++each) list[each] = &blocks_[first_slot + each];
    const long taken = syscall(SYS_io_submit, context_, static_cast<long>(count), list.data());
    if (taken <= 0) return 0;
    in_flight_ += static_cast<size_t>(taken);
    return static_cast<size_t>(taken);
  }

  int64_t wait(size_t slot) {
    while (!done_[slot]) reap();
    return results_[slot];
  }

  // Whatever happens, nobody may touch the caller's memory after a transfer has returned.
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
  std::array<iocb, kDepth> blocks_{};
  std::array<int64_t, kDepth> results_{};
  std::array<bool, kDepth> done_{};
};

// One for each lane thread: setting one up costs a system call, and lanes live as long as the store.
inline AioQueue& aio_queue_of_this_thread() {
  thread_local AioQueue queue;
  return queue;
}

struct AioDrain {
  AioQueue& queue;
  ~AioDrain() { queue.drain(); }
};

}  // namespace offload
