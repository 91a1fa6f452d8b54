#include "file_io.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "aio_queue.h"

namespace offload {
namespace {

// Each lane thread has one queue for its lifetime, because creating a queue takes a system call.
AioQueue& aio_queue_of_this_thread() {
  thread_local AioQueue queue;
  return queue;
}

}  // namespace

int FileIo::allocate(int descriptor, uint64_t offset, uint64_t bytes) {
  const int error_number = posix_fallocate(descriptor, static_cast<off_t>(offset), static_cast<off_t>(bytes));
  if (error_number != EINVAL && error_number != EOPNOTSUPP) return error_number;
  // The file system cannot allocate in advance: the file gets holes, and a full disk is noticed only at the write.
  return ftruncate(descriptor, static_cast<off_t>(offset + bytes)) == 0 ? 0 : errno;
}

int64_t FileIo::transfer(int descriptor, const FileTransfer& transfer) {
  const auto offset = static_cast<off_t>(transfer.offset);
  const ssize_t moved = transfer.writing ? pwrite(descriptor, transfer.data, transfer.bytes, offset)
                                         : pread(descriptor, transfer.data, transfer.bytes, offset);
  return moved < 0 ? -errno : moved;
}

size_t FileIo::start(int descriptor, const FileTransfer* transfers, size_t count, size_t slot) {
  AioQueue& queue = aio_queue_of_this_thread();
  return queue.valid() ? queue.submit(descriptor, transfers, count, slot) : 0;
}

int64_t FileIo::wait(int, const FileTransfer&, size_t slot) { return aio_queue_of_this_thread().wait(slot); }

void FileIo::drain() noexcept { aio_queue_of_this_thread().drain(); }

}  // namespace offload
