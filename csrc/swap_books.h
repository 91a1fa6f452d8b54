// What an engine keeps account of: the storages that it has swapped out, the copies under way, and bytes on the device.
//
// On the data path: engine_core.cpp starts copy-outs, swapped_storage.cpp swaps one storage in; both use these. Storages
// hold the books, and the books hold no storage: no cycle keeps a session's memory.
//
// Callers hold the GIL, which guards everything here. It is released while a copy is waited for, and any release of a
// Python object may run Python code: so an entry leaves its queue before anything else happens to it.
// A function that returns false leaves a Python error; errors of the store are C++ exceptions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "gauge.h"
#include "host_block.h"
#include "saved_identity.h"
#include "swap_store.h"
#include "tensor_interface.h"

namespace offload {

// A source that is being copied out, held until the copy no longer reads it.
struct CopyOut {
  std::shared_ptr<Ticket> ticket;
  Owned source;          // a tensor on the source's storage, which shares the saved tensor's version counter
  int64_t nbytes = 0;
  Stream stream = nullptr;
  PyObject* saved = nullptr;  // the SwappedStorage, as long as it is alive
};
using CopyOutRef = std::shared_ptr<CopyOut>;

// Memory that a copy-in fills: a block of the host's, or a storage of torch's on an accelerator.
struct Target {
  std::shared_ptr<HostBlock> block;
  Owned storage;
  explicit operator bool() const { return block != nullptr || storage; }
};

struct Books {
  std::shared_ptr<SwapStore> store;
  std::shared_ptr<Gauge> resident;   // bytes of swapped storages that are on the device
  std::shared_ptr<Gauge> unswapped;  // the same storages, had they stayed
  size_t alignment_bytes = 1;
  Owned device;          // torch's
  Owned current_stream;  // callable; null on the CPU
  Owned record_use;      // callable that takes a tensor; null on the CPU
  Owned new_storage;     // callable that takes bytes and an address modulo `alignment_bytes`; null: blocks of the host
  Owned warn;            // callable that takes a message and its argument
  int64_t in_flight_bytes = 0;
  int64_t in_flight_bytes_max = 0;
  int64_t misses = 0;
  int64_t failed = 0;
  std::string failure;
  std::unordered_map<SavedKey, PyObject*, SavedKeyHash> live;  // borrowed: a SwappedStorage takes itself out
  std::deque<CopyOutRef> copies_out;
  std::deque<std::pair<std::shared_ptr<Ticket>, Target>> retired;
  std::unordered_map<PyObject*, Owned> empties;  // by dtype, which torch keeps for good
};

// Handle of the compute stream that the calling thread uses now.
bool current_stream(const Books& books, Stream* stream);
// A tensor of the device without elements: borrowed; null, and a Python error, where there is no memory.
PyObject* empty_of(Books& books, PyObject* dtype);
// Whether `collect` has nothing to look at.
inline bool is_quiet(const Books& books) { return books.copies_out.empty() && books.retired.empty(); }
// Lets go of the sources and targets that no copy touches any more. Waits for nothing.
bool collect(Books& books);
// Waits until few enough bytes are in flight.
bool limit_in_flight(Books& books);
// Waits until a copy-out has ended, and lets go of its source.
bool finish_copy_out(Books& books, const CopyOutRef& copy_out);
// Waits until every copy has ended, and lets go of what they held.
bool drain(Books& books);
// Holds a target that nobody wants any more until the copy into it has ended.
void retire(Books& books, const std::shared_ptr<Ticket>& ticket, Target& target);

}  // namespace offload
