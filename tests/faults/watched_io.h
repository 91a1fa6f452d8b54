// The spill file's I/O, watched: the machine's order checker is told when a transfer begins and when it has ended.
#pragma once

#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "file_io.h"

namespace offload::faults {

class WatchedIo final : public FileIo {
 public:
  // `machine`: the path of the library that the store's driver has opened.
  explicit WatchedIo(const std::string& machine) {
    void* const library = dlopen(machine.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    begin_ = reinterpret_cast<decltype(begin_)>(dlsym(library, "sim_io_begin"));
    end_ = reinterpret_cast<decltype(end_)>(dlsym(library, "sim_io_end"));
  }

  int64_t transfer(int descriptor, const FileTransfer& transfer) override {
    void* const watched = begin(descriptor, transfer);
    const int64_t result = FileIo::transfer(descriptor, transfer);
    end_(watched);
    return result;
  }

  size_t start(int descriptor, const FileTransfer* transfers, size_t count, size_t slot) override {
    for (size_t each = 0; each < count; ++each) started_[slot + each] = begin(descriptor, transfers[each]);
    const size_t taken = FileIo::start(descriptor, transfers, count, slot);
    for (size_t each = taken; each < count; ++each) end(slot + each);
    return taken;
  }

  int64_t wait(int descriptor, const FileTransfer& transfer, size_t slot) override {
    const int64_t result = FileIo::wait(descriptor, transfer, slot);
    end(slot);
    return result;
  }

  void drain() noexcept override {
    FileIo::drain();
    for (size_t slot = 0; slot < kSlots; ++slot) end(slot);
  }

 private:
  void* begin(int descriptor, const FileTransfer& transfer) const {
    return begin_(transfer.data, transfer.bytes, transfer.writing ? 1 : 0, descriptor, transfer.offset);
  }

  void end(size_t slot) const {
    if (started_[slot] != nullptr) end_(started_[slot]);
    started_[slot] = nullptr;
  }

  inline static thread_local std::array<void*, kSlots> started_{};
  void* (*begin_)(const void*, size_t, int, int, uint64_t) = nullptr;
  void (*end_)(void*) = nullptr;
};

}  // namespace offload::faults
