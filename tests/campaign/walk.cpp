#include "walk.h"

#include <cerrno>
#include <random>

#include "../faults/faulty_io.h"
#include "error.h"
#include "swap_store.h"

namespace offload::campaign {
namespace {

// One saved tensor. Its ticket may be gone while its memory is still in use.
struct Saved {
  uint64_t pattern = 0;
  size_t bytes = 0;
  size_t residue = 0;
  Block source;
  Stream out_stream = nullptr;
  std::shared_ptr<Ticket> ticket;
  Block target;
  std::shared_ptr<void> owner;  // direct tier: frees the target
  bool failed_at_end = false;

  bool holds_source() const { return source.data != nullptr; }
};
using List = std::vector<Saved>;

class Walk {
 public:
  explicit Walk(const WalkOptions& options)
      : options_(options),
        random_(options.seed),
        is_direct_(options.tier == "direct"),
        base_(HostDriver::create(options.schedule, options.seed)),
        driver_(std::make_shared<LoggingDriver>(base_)),
        world_(std::make_shared<World>(driver_)) {
    StoreOptions store;
    store.spill_directory = options.tier == "slab" ? "" : options.directory;
    store.slice_bytes = kPage << below(3);
    if (is_direct_) {
      store_ = SwapStore::create_direct(base_, store);
      streams_ = {nullptr};
    } else {
      store.slab_bytes = kPage << (3 + below(4));
      store.host_bytes_max = kPage * (16 + below(64));
      store_ = SwapStore::create_slab(driver_, base_, store);
      streams_ = {driver_->stream_create(), driver_->stream_create()};
    }
    if (store_->spill_file() != nullptr) store_->spill_file()->replace_io(io_);
    idle_pool_bytes_ = store_->stats().pool.used_bytes;
  }

  WalkResult run() {
    WalkResult result;
    try {
      for (int step = 0; step < options_.steps && world_->failure().empty(); ++step) act();
      if (world_->failure().empty()) finish();
    } catch (const std::exception& error) {
      world_->fail(std::string("unexpected error: ") + error.what());
    }
    settle();
    result.failure = world_->failure();
    result.returned = returned_;
    result.faults = faults_;
    result.digest = world_->digest();
    result.log = driver_->take_log();
    return result;
  }

 private:
  uint64_t below(uint64_t bound) { return random_() % bound; }
  bool chance(unsigned percent) { return below(100) < percent; }
  Stream any_stream() { return streams_[below(streams_.size())]; }

  Saved take(List& list) {
    std::swap(list[below(list.size())], list.back());
    Saved saved = std::move(list.back());
    list.pop_back();
    return saved;
  }

  void act() {
    switch (below(12)) {
      case 0:
      case 1:
      case 2:
        return save();
      case 3:
      case 4:
        return depart_one();
      case 5:
      case 6:
        if (!away_.empty()) prefetch(take(away_));
        return;
      case 7:
      case 8:
        if (!coming_.empty()) swap_in(take(coming_));
        return;
      case 9:
        return drop_one();
      case 10:
        return collect();
      default:
        return rarely();
    }
  }

  // Forward: a kernel writes a block, and the hooks save it.
  void save() {
    if (departing_.size() + away_.size() + coming_.size() > 16) return;
    Saved saved;
    saved.pattern = ++patterns_;
    saved.bytes = 1 + below(chance(30) ? 3 * kPage : 12 * kPage);
    saved.residue = is_direct_ && chance(40) ? 64 * below(8) : 0;
    saved.out_stream = any_stream();
    saved.source = world_->allocate(saved.bytes + saved.residue, saved.out_stream);
    char* data = saved.source.data + saved.residue;
    world_->fill(saved.source, data, saved.bytes, saved.pattern);
    const uint64_t need = below(1000) * 1000 + saved.pattern;  // unequal, so that no address decides
    try {
      saved.ticket = std::make_shared<Ticket>(store_->swap_out(data, saved.bytes, saved.out_stream, need));
    } catch (const PoolExhausted&) {
      world_->note(1);
      world_->free(saved.source);
      return;
    }
    departing_.push_back(std::move(saved));
  }

  void free_source(Saved& saved) {
    world_->free(saved.source);
    saved.source = {};
  }

  // The source may go: by what was seen, or by making its stream wait. Where nothing was copied it is whole.
  void has_departed(Saved saved) {
    const State state = saved.ticket->state();
    if (state == State::failed || state == State::cancelled) {
      if (state == State::failed && faults_ == 0) world_->fail("a copy-out failed although nothing was injected");
      world_->expect(saved.source, saved.source.data + saved.residue, saved.bytes, saved.pattern, "that never left");
      free_source(saved);
      return;
    }
    free_source(saved);
    away_.push_back(std::move(saved));
  }

  void depart_one() {
    if (departing_.empty()) return;
    Saved saved = take(departing_);
    if (chance(20) && !saved.ticket->out_done()) {
      departing_.push_back(std::move(saved));
      return;
    }
    saved.ticket->wait_out(saved.out_stream);
    has_departed(std::move(saved));
  }

  void prefetch(Saved saved) {
    const Stream stream = any_stream();
    const Block target = world_->allocate(saved.bytes + saved.residue, stream);
    saved.target = target;
    if (is_direct_)
      saved.owner = std::shared_ptr<void>(target.data, [world = world_, target](void*) { world->free(target); });
    saved.ticket->prefetch(target.data + saved.residue, stream, saved.owner);
    if (is_direct_ && chance(15)) saved.owner = nullptr;  // the copy alone keeps its target now
    coming_.push_back(std::move(saved));
  }

  // Unpack: the consumer's kernel follows at once on the stream that waited.
  void swap_in(Saved saved) {
    if (chance(10)) saved.ticket->in_done();
    try {
      saved.ticket->swap_in(saved.target.stream);
    } catch (const SpillError& error) {
      world_->note(2);
      if (faults_ == 0 || (is_ending_ && saved.failed_at_end)) throw;
      saved.failed_at_end = is_ending_;  // a fault of before, that nobody has asked about until now
      free_target(saved);
      away_.push_back(std::move(saved));
      return;
    }
    ++returned_;
    if (saved.owner != nullptr || !is_direct_)
      world_->expect(saved.target, saved.target.data + saved.residue, saved.bytes, saved.pattern, "after a return");
    free_target(saved);
    if (chance(30)) away_.push_back(std::move(saved));  // a retained graph may come again
  }

  void free_target(Saved& saved) {
    if (is_direct_) {
      saved.owner = nullptr;
    } else {
      world_->free(saved.target);
    }
    saved.target = {};
  }

  // The graph dies: whatever its tensors were doing.
  void drop_one() {
    List& list = *std::vector<List*>{&departing_, &away_, &coming_, &coming_}[below(4)];
    if (list.empty()) return;
    Saved saved = take(list);
    if (&list == &departing_) {
      const bool cancelled = saved.ticket->cancel();
      world_->note(cancelled);
      if (cancelled && saved.ticket->state() != State::cancelled)
        world_->fail("cancel said yes to a copy that is " + std::string(state_name(saved.ticket->state())));
      if (!cancelled) saved.ticket->wait_out(saved.out_stream);
      free_source(saved);
    } else if (&list == &coming_ && chance(50)) {
      retired_.push_back(std::move(saved));  // held until the copy into it has ended
      return;
    } else if (&list == &coming_ && !is_direct_) {
      saved.ticket = nullptr;  // its slot goes; its memory waits for the next quiet moment
      limbo_.push_back(std::move(saved));
      return;
    }
    saved.ticket = nullptr;
  }

  void collect() {
    for (size_t i = departing_.size(); i-- > 0;) {
      if (!departing_[i].ticket->out_done()) continue;
      std::swap(departing_[i], departing_.back());
      Saved saved = std::move(departing_.back());
      departing_.pop_back();
      has_departed(std::move(saved));
    }
    for (size_t i = retired_.size(); i-- > 0;) {
      if (!retired_[i].ticket->in_done()) continue;
      std::swap(retired_[i], retired_.back());
      free_target(retired_.back());
      retired_.pop_back();
    }
  }

  void rarely() {
    switch (below(4)) {
      case 0:
        store_->trim();
        return;
      case 1:
        return quiet();
      default:
        return inject();
    }
  }

  void quiet() {
    store_->quiesce();  // cancels what has not begun
    for (Saved& saved : limbo_) world_->free(saved.target);
    limbo_.clear();
  }

  void inject() {
    if (store_->spill_file() == nullptr) return;
    using faults::Kind;
    using faults::Operation;
    const uint64_t nth = 1 + below(4);
    switch (below(5)) {
      case 0:
        return inject({Operation::read, Kind::error, nth, EIO});
      case 1:
        return inject({Operation::write, Kind::error, nth, ENOSPC});
      case 2:
        return inject({Operation::read, Kind::wrong_block, nth});
      case 3:
        return inject({Operation::read, Kind::short_transfer, nth});
      default:
        return inject({Operation::write, Kind::short_transfer, nth});
    }
  }

  void inject(const faults::Fault& fault) {
    ++faults_;
    io_->inject(fault);
  }

  // Everything comes back or goes, and nothing may be left.
  void finish() {
    is_ending_ = true;
    io_->inject(faults::kNone);
    while (!departing_.empty()) {
      Saved saved = take(departing_);
      saved.ticket->wait_out(saved.out_stream);
      has_departed(std::move(saved));
    }
    for (int rounds = 0; rounds < 200 && !(coming_.empty() && away_.empty()); ++rounds) {
      if (!away_.empty()) prefetch(take(away_));
      if (!coming_.empty() && (away_.empty() || chance(50))) swap_in(take(coming_));
    }
    for (List* list : {&coming_, &retired_}) {
      while (!list->empty()) {
        Saved saved = take(*list);
        try {
          saved.ticket->swap_in(saved.target.stream);
        } catch (const SpillError&) {
          if (faults_ == 0) throw;
        }
        free_target(saved);
      }
    }
    away_.clear();
    store_->quiesce();
    for (Saved& saved : limbo_) world_->free(saved.target);
    limbo_.clear();
    world_->expect_all_idle_poisoned();
    const StoreStats stats = store_->stats();
    if (stats.live_tickets != 0) world_->fail(std::to_string(stats.live_tickets) + " tickets are left");
    if (stats.spill.used_bytes != 0)
      world_->fail(std::to_string(stats.spill.used_bytes) + " bytes of extents are left");
    if (stats.pool.used_bytes != idle_pool_bytes_)
      world_->fail(std::to_string(stats.pool.used_bytes - idle_pool_bytes_) + " pool bytes are left");
  }

  // Kernels refer to this world: they end before it does, whatever went wrong.
  void settle() {
    try {
      for (List* list : {&departing_, &away_, &coming_, &retired_}) list->clear();
      store_->quiesce();
      for (const Stream stream : streams_) driver_->stream_synchronize(stream);
      for (const Stream stream : streams_)
        if (stream != nullptr) driver_->stream_destroy(stream);
    } catch (const std::exception& error) {
      world_->fail(std::string("the end of the walk: ") + error.what());
    }
    limbo_.clear();
    store_ = nullptr;
  }

  const WalkOptions options_;
  std::mt19937_64 random_;
  const bool is_direct_;
  const std::shared_ptr<HostDriver> base_;
  const std::shared_ptr<LoggingDriver> driver_;
  const std::shared_ptr<World> world_;
  const std::shared_ptr<faults::FaultyIo> io_ = std::make_shared<faults::FaultyIo>();
  std::shared_ptr<SwapStore> store_;
  std::vector<Stream> streams_;
  size_t idle_pool_bytes_ = 0;
  uint64_t patterns_ = 0;
  uint64_t returned_ = 0;
  uint64_t faults_ = 0;
  bool is_ending_ = false;
  List departing_;  // the source is held
  List away_;
  List coming_;   // prefetched
  List retired_;  // prefetched, nobody wants it
  List limbo_;    // targets of tickets dropped on their way in
};

}  // namespace

WalkResult walk(const WalkOptions& options) { return Walk(options).run(); }

}  // namespace offload::campaign
