#include "spill_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <vector>

#include "checksum.h"
#include "error.h"
#include "mutants.h"

namespace offload {
namespace {

constexpr size_t kPieceBytes = size_t{4} << 20;
constexpr size_t kPiecesInFlight = 4;  // for one large transfer
#ifdef OFFLOAD_MUTANTS
constexpr uint64_t kGrowthBytes = uint64_t{1} << 20;  // small: a test run creates thousands of stores
#else
constexpr uint64_t kGrowthBytes = uint64_t{64} << 20;
#endif
constexpr int kAttemptsMax = 1000;  // attempts without progress: EINTR, EAGAIN, transfers shorter than a sector

// Waits at the end of a transfer, or when it throws, until the kernel no longer uses the caller's memory.
struct Drain {
  FileIo& io;
  ~Drain() { io.drain(); }
};

}  // namespace

SpillFile::SpillFile(const std::string& directory, bool checks_every_byte)
    : path_(directory), checks_every_byte_(checks_every_byte) {
  open_in(directory);
  probe_alignment();
}

SpillFile::~SpillFile() { close(descriptor_); }

void SpillFile::fail(int error_number, uint64_t offset, const char* what) const {
  const int64_t at = OFFLOAD_BROKEN("an error names the offset in the spill file") ? -1 : static_cast<int64_t>(offset);
  throw SpillError(error_number, path_, at, what);
}

void SpillFile::open_in(const std::string& directory) {
  const int base = O_RDWR | O_CLOEXEC;
  const mode_t mode = OFFLOAD_BROKEN("the spill file is its owner's") ? 0644 : 0600;
  for (const int direct : {O_DIRECT, 0}) {
    if (OFFLOAD_BROKEN("the spill file has no name")) break;
    descriptor_ = open(directory.c_str(), base | O_TMPFILE | O_EXCL | direct, mode);
    direct_ = direct != 0;
    if (descriptor_ >= 0) return;
    if (errno == ENOENT || errno == EACCES || errno == ENOSPC || errno == EROFS || errno == ENOTDIR)
      fail(errno, 0, "cannot create the spill file");
  }
  std::string folder = directory + "/offload-XXXXXX";  // for file systems without O_TMPFILE
  if (mkdtemp(folder.data()) == nullptr) fail(errno, 0, "cannot create a private folder for the spill file");
  const std::string file = folder + "/spill";
  int error_number = 0;
  for (const int direct : {O_DIRECT, 0}) {
    const int own = OFFLOAD_BROKEN("a planted link is refused") ? 0 : O_EXCL | O_NOFOLLOW;
    descriptor_ = open(file.c_str(), base | O_CREAT | own | direct, mode);
    direct_ = direct != 0;
    error_number = errno;
    OFFLOAD_EDGE("the spill file has no name", unlink(file.c_str()));
    if (descriptor_ >= 0 || error_number == EEXIST) break;  // EEXIST: a file or link of another user, not to be used
  }
  rmdir(folder.c_str());
  if (descriptor_ < 0) fail(error_number, 0, "cannot create the spill file");
}

void SpillFile::probe_alignment() {
  if (!direct_) return;
  alignment_bytes_ = kExtentBytes;
#ifdef STATX_DIOALIGN
  struct statx about{};
  if (statx(descriptor_, "", AT_EMPTY_PATH, STATX_DIOALIGN, &about) != 0 || !(about.stx_mask & STATX_DIOALIGN)) return;
  const size_t asked_bytes = std::max<size_t>(about.stx_dio_mem_align, about.stx_dio_offset_align);
  // The file system does not support O_DIRECT, or requires a larger alignment than that of extents and slabs.
  if (about.stx_dio_mem_align == 0 || asked_bytes > kExtentBytes) {
    fcntl(descriptor_, F_SETFL, fcntl(descriptor_, F_GETFL) & ~O_DIRECT);
    direct_ = false;
    alignment_bytes_ = 1;
    return;
  }
  alignment_bytes_ = asked_bytes;
#endif
}

void SpillFile::grow(uint64_t bytes) {
  const uint64_t wanted = free_.round_up(bytes);
  for (const uint64_t growth : {std::max(wanted, kGrowthBytes), wanted}) {
    int error_number = EINTR;
    for (int attempt = 0; error_number == EINTR && attempt < kAttemptsMax; ++attempt) {
      error_number = io().allocate(descriptor_, stats_.file_bytes, growth);
      if (error_number == EINTR && OFFLOAD_BROKEN("an interrupted allocation is repeated"))
        fail(error_number, stats_.file_bytes, "cannot allocate space for the spill file");
    }
    if (error_number == 0 || OFFLOAD_BROKEN("an allocation that failed is reported")) {
      free_.grow(stats_.file_bytes, growth);
      stats_.file_bytes += growth;
      return;
    }
    if (growth == wanted) fail(error_number, stats_.file_bytes, "cannot allocate space for the spill file");
  }
}

Extent SpillFile::allocate(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  auto offset = free_.allocate(bytes);
  if (!offset) {
    grow(bytes);
    offset = free_.allocate(bytes);
  }
  stats_.used_bytes += free_.round_up(bytes);
  stats_.high_water_bytes = std::max(stats_.high_water_bytes, stats_.used_bytes);
  return {*offset, bytes};
}

std::vector<Extent> SpillFile::allocate_adjacent(const std::vector<uint64_t>& bytes) {
  uint64_t total_bytes = 0;
  for (const uint64_t each : bytes) total_bytes += free_.round_up(each);
  std::vector<Extent> extents;
  extents.reserve(bytes.size());
  uint64_t offset = allocate(total_bytes).offset;
  for (const uint64_t each : bytes) {
    extents.push_back({offset, each});
    offset += free_.round_up(each);
  }
  return extents;
}

void SpillFile::release(const Extent& extent) {
  if (!extent) return;
#ifdef OFFLOAD_MUTANTS
  mutants::scribble(descriptor_, extent.offset, free_.round_up(extent.bytes));
#endif
  std::lock_guard lock(mutex_);
  try {
    free_.release(extent.offset, extent.bytes);
  } catch (const std::bad_alloc&) {
    return;  // there is no memory to record the release: the extent stays counted as used
  }
  stats_.used_bytes -= free_.round_up(extent.bytes);
}

uint32_t SpillFile::write(const Extent& extent, uint64_t at, const void* data, size_t bytes, uint32_t crc) {
  auto* source = static_cast<char*>(const_cast<void*>(data));  // only read
  const uint32_t sum = transfer({true, source, bytes, extent.offset + at}, crc);
  std::lock_guard lock(mutex_);
  stats_.written_bytes += bytes;
  return sum;
}

uint32_t SpillFile::read(const Extent& extent, uint64_t at, void* data, size_t bytes, uint32_t crc) {
  const uint32_t sum = transfer({false, static_cast<char*>(data), bytes, extent.offset + at}, crc);
  std::lock_guard lock(mutex_);
  stats_.read_bytes += bytes;
  return sum;
}

uint32_t SpillFile::transfer(const FileTransfer& whole, uint32_t crc) {
  FileIo& io = this->io();
  const Drain drain{io};
  const size_t pieces = (whole.bytes + kPieceBytes - 1) / kPieceBytes;
  const auto piece_at = [&](size_t piece) {
    const size_t at = piece * kPieceBytes;
    return FileTransfer{whole.writing, whole.data + at, std::min(kPieceBytes, whole.bytes - at), whole.offset + at};
  };
  std::array<bool, kPiecesInFlight> started{};
  const auto start = [&](size_t piece) {
    const FileTransfer transfer = piece_at(piece);
    const size_t slot = piece % kPiecesInFlight;
    started[slot] = direct_ && io.start(descriptor_, &transfer, 1, slot) == 1;
  };
  for (size_t piece = 0; piece < std::min(pieces, kPiecesInFlight); ++piece) start(piece);
  for (size_t piece = 0; piece < pieces; ++piece) {
    const size_t slot = piece % kPiecesInFlight;
    const FileTransfer transfer = piece_at(piece);
    if (transfer.writing) crc = checked(crc, transfer.data, transfer.bytes, transfer.offset);
    finish(io, transfer, started[slot] ? io.wait(descriptor_, transfer, slot) : 0);
    if (piece + kPiecesInFlight < pieces) start(piece + kPiecesInFlight);
    if (!transfer.writing) crc = checked(crc, transfer.data, transfer.bytes, transfer.offset);
  }
  return crc;
}

uint32_t SpillFile::checked(uint32_t crc, const void* data, size_t bytes, uint64_t offset) const {
  return checks_every_byte_ ? crc32c(crc, data, bytes) : crc32c_of_blocks(crc, data, bytes, offset);
}

void SpillFile::write_together(std::vector<Piece>& pieces) {
  for (size_t at = 0; at < pieces.size(); at += FileIo::kSlots)
    transfer_together(true, &pieces[at], std::min(FileIo::kSlots, pieces.size() - at));
}

void SpillFile::read_together(std::vector<Piece>& pieces) {
  for (size_t at = 0; at < pieces.size(); at += FileIo::kSlots)
    transfer_together(false, &pieces[at], std::min(FileIo::kSlots, pieces.size() - at));
}

void SpillFile::transfer_together(bool writing, Piece* pieces, size_t count) {
  FileIo& io = this->io();
  const Drain drain{io};
  std::array<FileTransfer, FileIo::kSlots> transfers;
  for (size_t each = 0; each < count; ++each)
    transfers[each] = {writing, pieces[each].data, pieces[each].bytes, pieces[each].extent.offset};
  const size_t started = direct_ ? io.start(descriptor_, transfers.data(), count, 0) : 0;
  uint64_t done_bytes = 0;
  for (size_t each = 0; each < count; ++each) {
    Piece& piece = pieces[each];
    if (writing) piece.crc = checked(piece.crc, piece.data, piece.bytes, piece.extent.offset);
    try {
      finish(io, transfers[each], each < started ? io.wait(descriptor_, transfers[each], each) : 0);
    } catch (...) {
      piece.failure = std::current_exception();
      continue;
    }
    if (!writing) piece.crc = checked(piece.crc, piece.data, piece.bytes, piece.extent.offset);
    done_bytes += piece.bytes;
  }
  std::lock_guard lock(mutex_);
  (writing ? stats_.written_bytes : stats_.read_bytes) += done_bytes;
}

// Completes a transfer. `result`: bytes done so far (0: it has not begun), or −errno if it failed.
void SpillFile::finish(FileIo& io, const FileTransfer& whole, int64_t result) {
  const bool writing = whole.writing;
  bool attempted = result != 0;
  size_t done = 0;
  for (int attempt = 0; attempt < kAttemptsMax; ++attempt) {
    const bool was_interrupted = result == -EINTR && !OFFLOAD_BROKEN("an interrupted transfer is repeated");
    if (result < 0 && !was_interrupted && result != -EAGAIN)
      fail(static_cast<int>(-result), whole.offset + done, writing ? "spill write failed" : "spill read failed");
    if (attempted && result == 0 && OFFLOAD_BROKEN("a read that ends early is reported")) return;
    if (attempted && result == 0)
      fail(EIO, whole.offset + done, writing ? "spill write wrote nothing" : "spill file ends early");
    if (result > 0 && (done + static_cast<size_t>(result) >= whole.bytes || OFFLOAD_BROKEN("short write is continued")))
      return;
    if (result >= static_cast<int64_t>(alignment_bytes_)) {
      attempt = 0;
      done += static_cast<size_t>(result) / alignment_bytes_ * alignment_bytes_;  // it may stop within a sector
    }
    result = io.transfer(descriptor_, {writing, whole.data + done, whole.bytes - done, whole.offset + done});
    attempted = true;
  }
  fail(EIO, whole.offset + done, writing ? "spill write makes no progress" : "spill read makes no progress");
}

void SpillFile::verify(const Extent& extent, uint32_t expected, uint32_t found) const {
  if (expected != found && !OFFLOAD_BROKEN("checksum is verified"))
    fail(EIO, extent.offset, "spilled bytes do not match their checksum");
}

uint64_t SpillFile::trim() {
  std::lock_guard lock(mutex_);
  const uint64_t tail_bytes = free_.cut_tail(stats_.file_bytes);
  if (tail_bytes == 0) return 0;
  if (ftruncate(descriptor_, static_cast<off_t>(stats_.file_bytes - tail_bytes)) != 0) {
    free_.grow(stats_.file_bytes - tail_bytes, tail_bytes);
    return 0;
  }
  stats_.file_bytes -= tail_bytes;
  return tail_bytes;
}

SpillStats SpillFile::stats() const {
  std::lock_guard lock(mutex_);
  return stats_;
}

}  // namespace offload
