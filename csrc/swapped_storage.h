// One swapped storage, or one span of it, at one version: its copy-out, its copy-in, and the views that still need it.
//
// engine_core.cpp creates one at pack. Only autograd nodes hold it, through the views that were saved; other code holds
// weak references. It is freed with the last of these nodes. Freeing it runs no Python code: if a signal handler raised
// an exception in such code, the exception would be lost.
//
// Callers hold the GIL. A function that returns false sets a Python error; errors of the store are C++ exceptions.
#pragma once

#include <memory>
#include <mutex>

#include "swap_books.h"
#include "tensor_interface.h"

namespace offload {

struct SwappedState {
  std::shared_ptr<Books> books;  // the engine's records (swap_books.h)
  std::shared_ptr<Ticket> ticket;
  SavedKey key{};
  uintptr_t source_address = 0;  // address of the first byte
  PyObject* dtype = nullptr;     // of the source; borrowed, as torch never frees a dtype
  int64_t views = 0;             // number of saved tensors on this storage
  int64_t views_left = 0;        // number of these that backward has not unpacked yet
  bool is_counted = false;       // the bytes were added to the gauges `unswapped` and `resident` of `books`
  Owned owner;                   // Python's weak reference to the owner of the version counter
  Owned counter;                 // shares the saved tensors' version counter; null if they can no longer change
  CopyOutRef copy_out;           // null after the copy-out has ended and the source has been released
  // The bytes on the device after the copy-in.
  Target target;
  int64_t begin = 0;   // offset of the first byte in the target
  bool is_incoming = false;
  Stream stream = nullptr;
  // Guards the state while the GIL is released. Recursive, because the garbage collector may run code that drains the
  // engine in the same thread.
  std::recursive_mutex mutex;
};

struct SwappedStorage {
  PyObject_HEAD
  PyObject* weak_references;
  SwappedState state;
};

extern PyTypeObject* swapped_storage_type;

inline SwappedState& swapped(PyObject* object) { return reinterpret_cast<SwappedStorage*>(object)->state; }
inline bool is_swapped_storage(PyObject* object) { return Py_TYPE(object) == swapped_storage_type; }

// Creates the type. Returns false if there is a Python error.
bool add_swapped_storage_type(PyObject* module);
// Creates a storage whose copy-out has not begun. Null: a Python error (no memory).
PyObject* make_swapped_storage(const std::shared_ptr<Books>& books);
// Called when the copy-out has ended: releases the source unless backward has used it.
bool copied_out(PyObject* self);
// Allocates memory and starts the copy-in, unless the bytes are on the device or a copy-in is under way.
bool prefetch(PyObject* self, bool* began);
// Waits until the copy-out has ended. Returns false if there is a Python error.
bool wait_copied_out(PyObject* self);
// Returns whether the bytes are not on the device and no copy-in is under way.
bool is_swapped_out(const SwappedState& state);
// Returns the target, ready for the current stream, and the offset of the bytes in it. Counts as one view's unpack.
bool swap_in(PyObject* self, Target* found, int64_t* begin);
// Returns a tensor that shares the saved tensors' version counter: a new reference, or null if they can no longer
// change.
PyObject* version_counter(PyObject* self);
// Returns the storage of a target; creates it if the target is a host block: a new reference, or null.
PyObject* storage_of_target(Target& target);
// Returns (owner, version, begin, nbytes, storage): a new reference, or null.
PyObject* to_tuple(const SavedKey& key);

// Converts a ticket to a Python object that keeps `owner` alive: a new reference, or null. Defined in
// hook_bindings.cpp.
PyObject* to_python(Ticket* ticket, PyObject* owner);
// Converts a host block to a Python object with the buffer interface: a new reference, or null. Defined in
// hook_bindings.cpp.
PyObject* to_python(const std::shared_ptr<HostBlock>& block);

}  // namespace offload
