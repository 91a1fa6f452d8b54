// The framework that a walk plays: device memory with a stream-ordered allocator, kernels, and a log of what was
// issued.
//
// Freed device memory is poisoned by a kernel on its own stream, as the next kernel of that stream might; whoever
// allocates a block again first checks that nobody has written to it since.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host_driver.h"
#include "mutants.h"

namespace offload::campaign {

constexpr size_t kPage = 4096;
constexpr char kPoison = static_cast<char>(mutants::kPoison);

enum class Kind : int { stream_create, record, wait, event_sync, stream_sync, kernel, allocate, free };

struct Range {
  uintptr_t address = 0;
  size_t bytes = 0;
};

// One operation, in the order of issue.
struct Entry {
  Kind kind;
  Stream stream = nullptr;
  Event event = nullptr;
  Range read{};
  Range written{};
  const char* what = "";
};

inline Range range_of(const void* address, size_t bytes) { return {reinterpret_cast<uintptr_t>(address), bytes}; }

// The host driver, and a log of every stream operation.
class LoggingDriver final : public Driver {
 public:
  explicit LoggingDriver(std::shared_ptr<HostDriver> base) : base_(std::move(base)) {}

  const char* name() const noexcept override { return "logging"; }
  void require_same_process() const override { base_->require_same_process(); }
  bool in_forked_child() const noexcept override { return base_->in_forked_child(); }

  Stream stream_create() override {
    const std::lock_guard lock(mutex_);
    const Stream stream = base_->stream_create();
    log_.push_back({Kind::stream_create, stream});
    return stream;
  }
  void stream_destroy(Stream stream) noexcept override { base_->stream_destroy(stream); }
  void stream_wait(Stream stream, Event event) override {
    const std::lock_guard lock(mutex_);
    log_.push_back({Kind::wait, stream, event});
    base_->stream_wait(stream, event);
  }
  void stream_synchronize(Stream stream) override {
    base_->stream_synchronize(stream);
    append({Kind::stream_sync, stream});
  }
  void require_not_capturing(Stream stream) override { base_->require_not_capturing(stream); }

  Event event_create() override { return base_->event_create(); }
  void event_destroy(Event event) noexcept override { base_->event_destroy(event); }
  void event_record(Event event, Stream stream) override {
    const std::lock_guard lock(mutex_);
    log_.push_back({Kind::record, stream, event});
    base_->event_record(event, stream);
  }
  // Who has seen that an event is done has waited for it.
  bool event_done(Event event) override {
    if (!base_->event_done(event)) return false;
    append({Kind::event_sync, nullptr, event});
    return true;
  }
  void event_synchronize(Event event) override {
    base_->event_synchronize(event);
    append({Kind::event_sync, nullptr, event});
  }
  double event_elapsed_ms(Event from, Event to) override { return base_->event_elapsed_ms(from, to); }

  void copy_out(void* host, const void* device, size_t bytes, Stream stream) override {
    const std::lock_guard lock(mutex_);
    log_.push_back({Kind::kernel, stream, nullptr, range_of(device, bytes), range_of(host, bytes), "copy_out"});
    base_->copy_out(host, device, bytes, stream);
  }
  void copy_in(void* device, const void* host, size_t bytes, Stream stream) override {
    const std::lock_guard lock(mutex_);
    log_.push_back({Kind::kernel, stream, nullptr, range_of(host, bytes), range_of(device, bytes), "copy_in"});
    base_->copy_in(device, host, bytes, stream);
  }
  void copy_out_batch(const Copy* copies, size_t count, Stream stream) override {
    for (size_t each = 0; each < count; ++each)
      copy_out(copies[each].to, copies[each].from, copies[each].bytes, stream);
  }
  void copy_in_batch(const Copy* copies, size_t count, Stream stream) override {
    for (size_t each = 0; each < count; ++each) copy_in(copies[each].to, copies[each].from, copies[each].bytes, stream);
  }
  void host_register(void* address, size_t bytes) override {
    append({Kind::allocate, nullptr, nullptr, {}, range_of(address, bytes)});
  }
  bool host_unregister(void* address) noexcept override {
    append({Kind::free, nullptr, nullptr, {}, range_of(address, 0)});
    return true;
  }
  DeviceMemory device_memory() override { return base_->device_memory(); }

  // The framework's own work, on `stream`.
  void launch(Stream stream, const char* what, Range read, Range written, std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    log_.push_back({Kind::kernel, stream, nullptr, read, written, what});
    base_->call(stream, std::move(work));
  }
  void append(const Entry& entry) {
    const std::lock_guard lock(mutex_);
    log_.push_back(entry);
  }
  std::vector<Entry> take_log() { return std::move(log_); }

 private:
  const std::shared_ptr<HostDriver> base_;
  std::mutex mutex_;
  std::vector<Entry> log_;
};

struct Block {
  char* data = nullptr;
  size_t capacity = 0;
  Stream stream = nullptr;
};

// Device memory, kernels and the first thing that went wrong. A null stream is the calling thread.
class World {
 public:
  explicit World(std::shared_ptr<LoggingDriver> driver) : driver_(std::move(driver)) {
    void* mapped = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    base_ = next_ = static_cast<char*>(mapped);
    driver_->append({Kind::allocate, nullptr, nullptr, {}, range_of(base_, kBytes)});
  }
  ~World() { munmap(base_, kBytes); }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  // A block of `stream`'s, as a caching allocator gives it: the one freed last, whatever its kernels still do.
  Block allocate(size_t bytes, Stream stream) {
    Block block{nullptr, (bytes + kPage - 1) / kPage * kPage, stream};
    bool used_before = false;
    {
      const std::lock_guard lock(mutex_);
      auto& idle = idle_[{index_of(stream), block.capacity}];
      used_before = !idle.empty();
      if (used_before) {
        block.data = idle.back();
        idle.pop_back();
      } else {
        if (next_ + block.capacity > base_ + kBytes) throw std::runtime_error("the walk's device memory is too small");
        block.data = next_;
        next_ += block.capacity;
      }
    }
    if (used_before) expect_poison(block);
    return block;
  }

  void free(const Block& block) {
    run(block.stream, "poison", {}, range_of(block.data, block.capacity),
        [block] { std::memset(block.data, kPoison, block.capacity); });
    const std::lock_guard lock(mutex_);
    idle_[{index_of(block.stream), block.capacity}].push_back(block.data);
  }

  // What freed memory held until the end: nobody may have written to it.
  void expect_all_idle_poisoned() {
    for (const auto& [kind, idle] : idle_)
      for (char* data : idle) expect_poison({data, kind.second, streams_[kind.first]});
  }

  void fill(const Block& block, char* data, size_t bytes, uint64_t pattern) {
    run(block.stream, "fill", {}, range_of(block.data, block.capacity), [=] {
      for (size_t i = 0; i < bytes; ++i) data[i] = byte_at(pattern, i);
    });
  }

  void expect(const Block& block, const char* data, size_t bytes, uint64_t pattern, const char* where) {
    run(block.stream, "consume", range_of(block.data, block.capacity), {}, [=] {
      for (size_t i = 0; i < bytes; ++i)
        if (data[i] != byte_at(pattern, i))
          return fail(std::string("wrong bytes ") + where + ": block " + std::to_string(pattern) + " of " +
                      std::to_string(bytes) + " bytes, first at " + std::to_string(i) +
                      (data[i] == kPoison ? " (poison)" : ""));
    });
  }

  void fail(const std::string& what) {
    const std::lock_guard lock(mutex_);
    if (failure_.empty()) failure_ = what;
  }
  std::string failure() {
    const std::lock_guard lock(mutex_);
    return failure_;
  }
  // Differs where kernels ran in another order: what "replays" means.
  uint64_t digest() const { return digest_; }
  void note(uint64_t what) {
    const std::lock_guard lock(mutex_);
    digest_ = (digest_ ^ what) * 0x100000001B3;
  }

 private:
  static constexpr size_t kBytes = size_t{32} << 20;

  static char byte_at(uint64_t pattern, size_t i) {
    return static_cast<char>((pattern * 0x9E3779B97F4A7C15 + i / 8 * 0xBF58476D1CE4E5B9) >> (8 * (i % 8)));
  }

  // By order of first use: addresses differ from run to run, and a seed must replay. Caller holds the lock.
  size_t index_of(Stream stream) {
    const auto found = std::find(streams_.begin(), streams_.end(), stream);
    if (found == streams_.end()) return streams_.push_back(stream), streams_.size() - 1;
    return static_cast<size_t>(found - streams_.begin());
  }

  void run(Stream stream, const char* what, Range read, Range written, std::function<void()> kernel) {
    const uint64_t number = ++launched_;
    auto work = [this, number, kernel = std::move(kernel)] {
      note(number);
      kernel();
    };
    if (stream == nullptr) return work();
    driver_->launch(stream, what, read, written, std::move(work));
  }

  void expect_poison(const Block& block) {
    run(block.stream, "expect poison", range_of(block.data, block.capacity), {}, [this, block] {
      if (std::any_of(block.data, block.data + block.capacity, [](char byte) { return byte != kPoison; }))
        fail("a freed block was written to");
    });
  }

  const std::shared_ptr<LoggingDriver> driver_;
  std::mutex mutex_;
  char* base_ = nullptr;
  char* next_ = nullptr;
  std::vector<Stream> streams_;
  std::map<std::pair<size_t, size_t>, std::vector<char*>> idle_;  // by stream and capacity
  std::string failure_;
  std::atomic<uint64_t> launched_{0};
  uint64_t digest_ = 0xCBF29CE484222325;
};

}  // namespace offload::campaign
