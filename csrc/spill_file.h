// The file to which both tiers write: one private file of extents, with direct I/O if the file system supports it.
//
// The file is unnamed (O_TMPFILE, or created in a 0700 directory and unlinked at once), mode 0600: the OS deletes it
// when the process ends. Space is allocated before it is written, so that a full disk is noticed early; freed extents
// are reused, so that the file does not grow from step to step. The result of every read and write is checked: short
// and interrupted transfers are continued; any other failure is a SpillError with errno, path and offset.
//
// Reads and writes are cut into pieces, a bounded number of which are in flight (with Linux AIO; with pread and pwrite
// if the kernel refuses AIO). The checksum of one piece (checksum.h) is computed while the next ones are in flight.
//
// Thread safe. read() and write() block their caller; they are called on lanes.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "extent_map.h"
#include "file_io.h"

namespace offload {

struct Extent {
  uint64_t offset = 0;
  uint64_t bytes = 0;

  explicit operator bool() const { return bytes > 0; }
};

struct SpillStats {
  uint64_t file_bytes = 0;  // allocated on disk
  uint64_t used_bytes = 0;  // bytes of allocated extents
  uint64_t high_water_bytes = 0;
  uint64_t written_bytes = 0;
  uint64_t read_bytes = 0;
};

struct Piece {
  Extent extent;
  char* data = nullptr;
  size_t bytes = 0;
  uint32_t crc = 0;  // checksum of what was written or read
  std::exception_ptr failure;
};

class SpillFile {
 public:
  // Throws SpillError if no file can be created in `directory`.
  explicit SpillFile(const std::string& directory, bool checks_every_byte = false);
  ~SpillFile();
  SpillFile(const SpillFile&) = delete;
  SpillFile& operator=(const SpillFile&) = delete;

  // Address, length and file offset of a transfer must be multiples of this. 1 if I/O is buffered: the file system has
  // no direct I/O, or requires a larger alignment than the 4096 bytes of extents.
  size_t alignment_bytes() const { return alignment_bytes_; }
  const std::string& path() const { return path_; }

  Extent allocate(uint64_t bytes);
  // Allocates adjacent extents, for blocks that are written together. Each is released separately.
  std::vector<Extent> allocate_adjacent(const std::vector<uint64_t>& bytes);
  void release(const Extent& extent);

  // Transfers `bytes` bytes at offset `at` of `extent`. Returns `crc` continued over them.
  uint32_t write(const Extent& extent, uint64_t at, const void* data, size_t bytes, uint32_t crc);
  uint32_t read(const Extent& extent, uint64_t at, void* data, size_t bytes, uint32_t crc);
  // The same for several small pieces, submitted together. An error is stored in the piece that failed.
  void write_together(std::vector<Piece>& pieces);
  void read_together(std::vector<Piece>& pieces);
  // Throws SpillError (EIO) if the checksums differ.
  void verify(const Extent& extent, uint32_t expected, uint32_t found) const;

  // Truncates the file behind its last extent. Returns the bytes freed.
  uint64_t trim();

  SpillStats stats() const;

  // The file's system calls, which a test can replace once. Transfers that begin later use the replacement, which lives
  // as long as the file.
  FileIo& io() const { return *io_.load(); }
  void replace_io(std::shared_ptr<FileIo> io) { io_ = (replacement_ = std::move(io)).get(); }
  int descriptor() const { return descriptor_; }

 private:
  void open_in(const std::string& directory);
  void probe_alignment();
  void grow(uint64_t bytes);
  uint32_t transfer(const FileTransfer& whole, uint32_t crc);
  // Continues `crc` over those of these bytes that checksums cover. `offset`: in the file.
  uint32_t checked(uint32_t crc, const void* data, size_t bytes, uint64_t offset) const;
  void transfer_together(bool writing, Piece* pieces, size_t count);
  void finish(FileIo& io, const FileTransfer& whole, int64_t result);
  [[noreturn]] void fail(int error_number, uint64_t offset, const char* what) const;

  std::string path_;
  int descriptor_ = -1;
  bool direct_ = false;
  const bool checks_every_byte_;  // else two cache lines of each block
  size_t alignment_bytes_ = 1;
  mutable std::mutex mutex_;
  ExtentMap free_{kExtentBytes};
  SpillStats stats_;
  FileIo kernel_;
  std::shared_ptr<FileIo> replacement_;
  std::atomic<FileIo*> io_{&kernel_};

  static constexpr uint64_t kExtentBytes = 4096;
};

}  // namespace offload
