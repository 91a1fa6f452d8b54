// Pool, streams, spill file and store under as many threads as it takes, for the sanitizers to watch.
//
//     stress ROUNDS SEED DIRECTORY [EDGE]
//
// Every round starts its threads anew and joins them; what they were working on is handed over to the next round's.
// Every block carries a cookie at both ends that is checked when it is given up. EDGE: the guard to leave out.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "error.h"
#include "event_pool.h"
#include "host_driver.h"
#include "mutants.h"
#include "slab_pool.h"
#include "spill_file.h"
#include "swap_store.h"

namespace {

using namespace offload;

constexpr int kThreads = 4;
constexpr int kActions = 60;
constexpr size_t kHeldMax = 200;  // some 7 MB of blocks: memory does not grow with the rounds

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::abort();
}

// Marks both ends of a block with what tells it from every other one.
void put_cookie(char* data, size_t bytes, uint64_t cookie) {
  std::memcpy(data, &cookie, sizeof cookie);
  std::memcpy(data + bytes - sizeof cookie, &cookie, sizeof cookie);
}

void check_cookie(const char* data, size_t bytes, uint64_t cookie) {
  uint64_t first = 0;
  uint64_t last = 0;
  std::memcpy(&first, data, sizeof first);
  std::memcpy(&last, data + bytes - sizeof last, sizeof last);
  require(first == cookie && last == cookie, "the cookie in a block is the one that was put there");
}

// What threads hand to one another.
template <typename Thing>
class Exchange {
 public:
  void put(Thing thing) {
    const std::lock_guard lock(mutex_);
    things_.push_back(std::move(thing));
  }
  bool take(Thing& thing, uint64_t draw) {
    const std::lock_guard lock(mutex_);
    if (things_.empty()) return false;
    std::swap(things_[draw % things_.size()], things_.back());
    thing = std::move(things_.back());
    things_.pop_back();
    return true;
  }
  size_t size() {
    const std::lock_guard lock(mutex_);
    return things_.size();
  }

 private:
  std::mutex mutex_;
  std::vector<Thing> things_;
};

using Action = std::function<void(std::mt19937_64&)>;

void run_threads(int rounds, uint64_t seed, const Action& action) {
  for (int round = 0; round < rounds; ++round) {
    std::vector<std::thread> threads;
    for (int number = 0; number < kThreads; ++number)
      threads.emplace_back([&, number] {
        std::mt19937_64 random(seed * 1000 + static_cast<uint64_t>(round * kThreads + number));
        for (int count = 0; count < kActions; ++count) action(random);
      });
    for (std::thread& thread : threads) thread.join();
  }
}

struct Marked {
  Block block;
  uint64_t cookie = 0;
};

void stress_pool(int rounds, uint64_t seed) {
  const auto driver = HostDriver::create();
  const auto events = std::make_shared<EventPool>(driver);
  SlabPool pool(driver, size_t{1} << 20, size_t{128} << 10);
  std::mutex mutex;  // the pool's owner locks
  Exchange<Marked> exchange;
  const Stream stream = driver->stream_create();
  const auto give_up = [&](const Marked& marked, bool fenced) {
    check_cookie(marked.block.data, marked.block.bytes, marked.cookie);
    const std::lock_guard lock(mutex);
    if (fenced) driver->call(stream, [marked] { check_cookie(marked.block.data, marked.block.bytes, marked.cookie); });
    pool.release(marked.block, fenced ? events->record(stream) : nullptr);
  };
  run_threads(rounds, seed, [&](std::mt19937_64& random) {
    Marked marked;
    if (random() % 2 == 0 && exchange.take(marked, random())) return give_up(marked, random() % 2 == 0);
    {
      const std::lock_guard lock(mutex);
      if (random() % 16 == 0) pool.trim(0);
      const auto block = pool.try_allocate(16 + random() % 30000);
      if (!block) return;
      marked = {*block, random()};
    }
    put_cookie(marked.block.data, marked.block.bytes, marked.cookie);
    exchange.put(marked);
  });
  for (Marked marked; exchange.take(marked, 0);) give_up(marked, false);
  driver->stream_synchronize(stream);
  const PoolStats stats = pool.stats();
  require(stats.used_bytes == 0 && stats.requested_bytes == 0, "the pool is empty");
  driver->stream_destroy(stream);
}

void stress_streams(int rounds, uint64_t seed) {
  const auto driver = HostDriver::create(LaneOrder::delays, seed);
  const auto events = std::make_shared<EventPool>(driver);
  Exchange<EventRef> exchange;
  run_threads(rounds, seed, [&](std::mt19937_64& random) {
    // A chain over two streams: each writes what it found plus one, so that a lost wait shows.
    const auto value = std::make_shared<int>(0);
    Stream streams[2] = {driver->stream_create(), driver->stream_create()};
    EventRef before;
    exchange.take(before, random());
    if (before != nullptr) driver->stream_wait(streams[0], before.get());
    constexpr int kLinks = 6;
    for (int link = 0; link < kLinks; ++link) {
      driver->call(streams[link % 2], [value] { ++*value; });
      driver->stream_wait(streams[(link + 1) % 2], events->record(streams[link % 2]).get());
    }
    const EventRef end = events->record(streams[kLinks % 2]);
    if (random() % 2 == 0) {
      driver->event_synchronize(end.get());
      require(*value == kLinks, "a chain of waits adds up");
    }
    exchange.put(end);
    for (const Stream stream : streams) driver->stream_destroy(stream);  // with work queued
  });
  for (EventRef left; exchange.take(left, 0);) driver->event_synchronize(left.get());
}

struct Written {
  Extent extent;
  uint32_t crc = 0;
  uint64_t cookie = 0;
};

void stress_spill(int rounds, uint64_t seed, const std::string& directory) {
  SpillFile file(directory);
  Exchange<Written> exchange;
  const auto give_up = [&](const Written& written) {
    char* const pages = map_pages(written.extent.bytes);
    const uint32_t crc = file.read(written.extent, 0, pages, written.extent.bytes, 0);
    file.verify(written.extent, written.crc, crc);
    check_cookie(pages, written.extent.bytes, written.cookie);
    unmap_pages(pages, written.extent.bytes);
    file.release(written.extent);
  };
  run_threads(rounds, seed, [&](std::mt19937_64& random) {
    Written written;
    if (random() % 2 == 0 && exchange.take(written, random())) return give_up(written);
    const size_t bytes = kPageBytes * (1 + random() % 8);
    char* const pages = map_pages(bytes);
    written = {file.allocate(bytes), 0, random()};
    put_cookie(pages, bytes, written.cookie);
    written.crc = file.write(written.extent, 0, pages, bytes, 0);
    unmap_pages(pages, bytes);
    exchange.put(written);
  });
  for (Written written; exchange.take(written, 0);) give_up(written);
  require(file.stats().used_bytes == 0, "the file is empty");
}

struct Swapped {
  std::shared_ptr<Ticket> ticket;
  std::shared_ptr<std::vector<char>> memory;  // the source, until it has left; then nobody's
  size_t residue = 0;
  uint64_t cookie = 0;
};

class StoreStress {
 public:
  explicit StoreStress(std::shared_ptr<SwapStore> store) : store_(std::move(store)) {}

  void act(std::mt19937_64& random) {
    Swapped swapped;
    const bool wants_more = random() % 2 == 0 && exchange_.size() < kHeldMax;
    if (wants_more || !exchange_.take(swapped, random())) return swap_out(random);
    if (random() % 8 == 0) return drop(swapped);
    swap_in(swapped);
    if (random() % 4 == 0) exchange_.put(swapped);
  }

  void end() {
    for (Swapped swapped; exchange_.take(swapped, 0);) swap_in(swapped);
    store_->quiesce();
    const StoreStats stats = store_->stats();
    require(stats.live_tickets == 0 && stats.spill.used_bytes == 0, "no ticket and no extent is left");
    require(stats.spill.written_bytes > 0, "more is swapped out than memory holds");
  }

 private:
  static std::shared_ptr<std::vector<char>> allocate(size_t bytes) {
    return std::make_shared<std::vector<char>>(bytes + 2 * kPageBytes);
  }
  // The first byte of `memory` with this residue, as the direct tier wants it.
  static char* place(std::vector<char>& memory, size_t residue) {
    const auto address = reinterpret_cast<uintptr_t>(memory.data());
    return memory.data() + (kPageBytes + residue - address % kPageBytes) % kPageBytes;
  }

  void swap_out(std::mt19937_64& random) {
    Swapped swapped;
    const size_t bytes = 16 + random() % 60000;
    swapped.memory = allocate(bytes);
    swapped.residue = 64 * (random() % 4);
    swapped.cookie = random();
    char* const source = place(*swapped.memory, swapped.residue);
    put_cookie(source, bytes, swapped.cookie);
    try {
      swapped.ticket = std::make_shared<Ticket>(store_->swap_out(source, bytes, nullptr, random()));
    } catch (const PoolExhausted&) {
      return;
    }
    exchange_.put(std::move(swapped));
  }

  static void leave(Swapped& swapped) {
    if (swapped.memory == nullptr) return;
    swapped.ticket->wait_out(nullptr);
    check_cookie(place(*swapped.memory, swapped.residue), swapped.ticket->bytes(), swapped.cookie);
    swapped.memory = nullptr;
  }

  static void drop(Swapped& swapped) {
    if (!swapped.ticket->cancel()) leave(swapped);
    swapped.ticket = nullptr;
  }

  static void swap_in(Swapped& swapped) {
    leave(swapped);
    const auto target = allocate(swapped.ticket->bytes());
    char* const data = place(*target, swapped.residue);
    swapped.ticket->prefetch(data, nullptr, target);
    swapped.ticket->swap_in(nullptr);
    check_cookie(data, swapped.ticket->bytes(), swapped.cookie);
  }

  const std::shared_ptr<SwapStore> store_;
  Exchange<Swapped> exchange_;
};

void stress_store(int rounds, uint64_t seed, const std::string& directory, bool is_direct) {
  const auto lanes = HostDriver::create(LaneOrder::threads, seed);
  StoreOptions options;
  options.spill_directory = directory;
  options.slice_bytes = 2 * kPageBytes;
  options.slab_bytes = size_t{128} << 10;
  options.host_bytes_max = size_t{512} << 10;
  StoreStress stress(is_direct ? SwapStore::create_direct(lanes, options)
                               : SwapStore::create_slab(lanes, lanes, options));
  run_threads(rounds, seed, [&](std::mt19937_64& random) { stress.act(random); });
  stress.end();
}

size_t thread_count() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return static_cast<size_t>(std::distance(begin(tasks), end(tasks)));
}

// Nobody joins a lane: one that is still ending while the process does would look like a leak.
void await_lanes(size_t threads_before) {
  for (int tries = 0; thread_count() > threads_before; ++tries) {
    require(tries < 10000, "every lane ends once its driver is gone");
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const int rounds = std::atoi(argv[1]);
  const uint64_t seed = std::strtoull(argv[2], nullptr, 10);
  const std::string directory = argv[3];
  mutants::break_edge(argc > 4 ? argv[4] : "");
  std::thread([] {}).join();  // with the first thread a sanitizer starts one of its own, which stays
  const size_t threads_before = thread_count();
  stress_pool(rounds, seed);
  stress_streams(rounds, seed);
  stress_spill(rounds, seed, directory);
  stress_store(rounds, seed, directory, false);
  stress_store(rounds, seed, directory, true);
  await_lanes(threads_before);
  std::printf("%d rounds of %d threads\n", 5 * rounds, kThreads);
  return 0;
}
