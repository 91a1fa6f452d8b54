// The records of an engine: swapped storages, copies under way, and bytes on the device.
//
// engine_core.cpp starts copy-outs and swapped_storage.cpp swaps a storage in; both use these records. A storage
// owns a reference to the records (`Books`), and the records only borrow storages, so there is no reference cycle.
//
// Callers hold the GIL, which guards everything here. It is released while a thread waits for a copy, and releasing a
// Python object may run Python code. So an entry is removed from its queue before anything else is done with it.
// A function that returns false sets a Python error; errors of the store are C++ exceptions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>

#include "dlpack_api.h"
#include "gauge.h"
#include "host_block.h"
#include "saved_identity.h"
#include "swap_store.h"
#include "tensor_interface.h"

namespace offload {

// Holds a source until its copy-out has ended; if backward has used it, until its SwappedStorage is freed.
struct CopyOut {
  std::shared_ptr<Ticket> ticket;
  Owned source;          // a tensor on the source's storage, which shares the saved tensor's version counter
  int64_t nbytes = 0;
  Stream stream = nullptr;
  bool is_used = false;       // backward has used the source, perhaps before the copy ended
  PyObject* saved = nullptr;  // the SwappedStorage, borrowed; null after it was freed
};
using CopyOutRef = std::shared_ptr<CopyOut>;

// Memory that a copy-in fills: a host block, or on an accelerator a torch storage.
struct Target {
  std::shared_ptr<HostBlock> block;
  Owned storage;
  explicit operator bool() const { return block != nullptr || storage; }
};

struct Books {
  Books() = default;
  Books(const Books&) = delete;
  Books& operator=(const Books&) = delete;
  // Waits for the copies that use the sources and targets. The engine and all its SwappedStorages have been freed.
  ~Books();

  std::shared_ptr<SwapStore> store;
  std::shared_ptr<Gauge> resident;   // bytes of swapped storages that are on the device
  std::shared_ptr<Gauge> unswapped;  // bytes of all swapped storages, as if they had been kept
  size_t alignment_bytes = 1;
  Owned device;          // a torch.device
  Owned current_stream;  // callable; null on the CPU
  Owned record_use;      // callable that takes a tensor; null on the CPU
  Owned new_storage;     // callable that takes bytes and an address modulo `alignment_bytes`; null: host blocks
  Owned warn;            // callable that takes a message and its argument
  bool is_device_known = false;
  dlpack::Device dlpack_device{};  // the same device for DLPack, if `is_device_known`
  int64_t in_flight_bytes = 0;
  int64_t in_flight_bytes_max = 0;
  int64_t misses = 0;
  int64_t failed = 0;  // copy-outs, and their bytes
  int64_t failed_bytes = 0;
  std::string failure;
  // SwappedStorages, borrowed; each removes itself. Of several with one key, all owners but one were freed.
  std::unordered_multimap<SavedKey, PyObject*, SavedKeyHash> live;
  std::deque<CopyOutRef> copies_out;
  std::deque<std::pair<std::shared_ptr<Ticket>, Target>> retired;
  std::unordered_map<PyObject*, Owned> empties;  // empty tensors by dtype; torch never frees a dtype
};

// Finds the handle of the compute stream that the calling thread uses now.
bool current_stream(const Books& books, Stream* stream);
// Returns an empty tensor on the device: borrowed. Null: a Python error (no memory).
PyObject* empty_of(Books& books, PyObject* dtype);
// Returns whether `collect` has nothing to do.
inline bool is_quiet(const Books& books) { return books.copies_out.empty() && books.retired.empty(); }
// Releases the sources and targets that no copy uses any more. Does not wait.
bool collect(Books& books);
// Waits until at most `in_flight_bytes_max` bytes are in flight.
bool limit_in_flight(Books& books);
// Waits until a copy-out has ended, and releases its source.
bool finish_copy_out(Books& books, const CopyOutRef& copy_out);
// Waits until every copy has ended, and releases all targets, and all sources but those that backward has used.
bool drain(Books& books);
// Keeps a target that is no longer needed alive until the copy into it has ended.
void retire(Books& books, const std::shared_ptr<Ticket>& ticket, Target& target);

}  // namespace offload
