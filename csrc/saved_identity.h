// Identifies the bytes of a saved tensor: the tensor that owns its version counter, the version, and the storage.
//
// engine_core.cpp uses it at every pack of a tensor that may be swapped. Callers hold the GIL; a function that fails
// sets a Python error.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tensor_interface.h"

namespace offload {

// Identity of the bytes of a saved tensor.
struct SavedKey {
  int64_t owner;    // identity of the tensor that owns the version counter
  int64_t version;
  int64_t begin;    // offset of the first byte in the storage
  int64_t nbytes;
  int64_t storage;  // identity of the storage

  bool operator==(const SavedKey& other) const {
    return owner == other.owner && version == other.version && begin == other.begin && nbytes == other.nbytes &&
           storage == other.storage;
  }
};

struct SavedKeyHash {
  size_t operator()(const SavedKey& key) const {
    size_t hash = 0;
    for (const int64_t part : {key.owner, key.version, key.begin, key.nbytes, key.storage})
      hash = (hash ^ static_cast<size_t>(part)) * size_t{0x9E3779B97F4A7C15};
    return hash;
  }
};

// The objects that a key identifies, fetched once for each pack.
struct SavedIdentity {
  SavedKey key{};
  Owned owner;    // the tensor whose version counter the saved tensor shares
  Owned storage;  // torch's storage
  int64_t version = 0;    // of the tensor
  uintptr_t address = 0;  // of the first byte; 0: not known
  PyObject* dtype = nullptr;  // borrowed, as torch never frees a dtype; null: not known
};

// Fetches the owner and the storage of a tensor, unless they are known. Returns false if there is a Python error.
bool identify(PyObject* tensor, SavedIdentity* found);
// Finds the key of a tensor's whole storage. Returns 1; 0 if there is no key, because the owner covers only a part of
// the storage; −1: a Python error.
int find_key(PyObject* tensor, int64_t nbytes, SavedIdentity* found);
// Returns the tensor whose version counter `tensor` shares: a new reference, or null.
PyObject* version_owner(PyObject* tensor);
// Adds version_owner(tensor) to the module. Returns false if there is a Python error.
bool add_identity_functions(PyObject* module);

}  // namespace offload
