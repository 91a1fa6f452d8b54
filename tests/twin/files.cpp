#include "files.h"

#include <cstring>

#include "machine.h"

using namespace sim;

namespace {

// An actor serves one transfer after another: the host has learnt of the one when the next begins.
std::vector<Actor*>& idle_actors() {
  static auto* const idle = new std::vector<Actor*>;
  return *idle;
}

Actor* take_actor() {
  auto& idle = idle_actors();
  if (idle.empty()) {
    idle.push_back(new Actor);
    idle.back()->number = ++state.streams_started;
    idle.back()->name = strdup(("file lane " + std::to_string(state.streams_started)).c_str());
  }
  Actor* const actor = idle.back();
  idle.pop_back();
  return actor;
}

// Bytes of a file have addresses of their own, where no memory is.
const void* place_in(int file, uint64_t offset) {
  return reinterpret_cast<const void*>((uint64_t{1} << 63) | (static_cast<uint64_t>(file) << 44) | offset);
}

}  // namespace

void* sim_io_begin(const void* memory, size_t bytes, int is_to_file, int file, uint64_t offset) {
  const Lock lock(state.mutex);
  const bool writes_file = is_to_file != 0;
  const char* const what = writes_file ? "a write to a file" : "a read from a file";
  Actor* const actor = take_actor();
  actor->knows.learn(state.host.knows);
  state.order.access(*actor, memory, bytes, !writes_file, what, state.violations);
  state.order.access(*actor, place_in(file, offset), bytes, writes_file, what, state.violations);
  ++state.calls[writes_file ? "file write" : "file read"];
  state.changed.notify_all();
  return actor;
}

void sim_io_end(void* transfer) {
  const Lock lock(state.mutex);
  auto* const actor = static_cast<Actor*>(transfer);
  host_learns(actor->knows);
  idle_actors().push_back(actor);
}
