// The bytes of one storage (or of one span of it) at one version, out of the device: its copy-out, its copy-in, and who
// still needs its bytes.
//
// On the data path: engine_core.cpp makes one at pack; graph nodes hold it through the views that were saved, and nobody
// else does. When the last one goes, its slot is free and no Python code has run: an exception that the handler of a
// signal raised there would be lost. Observers hold weak references.
//
// Callers hold the GIL. A function that returns false leaves a Python error; errors of the store are C++ exceptions.
#pragma once

#include <memory>
#include <mutex>

#include "swap_books.h"
#include "tensor_interface.h"

namespace offload {

struct SwappedState {
  std::shared_ptr<Books> books;
  std::shared_ptr<Ticket> ticket;
  SavedKey key{};
  uintptr_t source_address = 0;  // of its first byte
  int64_t views = 0;             // saved tensors that show it
  int64_t views_left = 0;        // of them, those that backward has not asked for
  bool is_counted = false;       // in the books' `unswapped` and `resident`
  Owned owner;                   // keeps the address of the version counter's owner from being used again
  Owned counter;                 // shares the saved tensors' version counter; null where nobody can change it any more
  CopyOutRef copy_out;           // null once the copy-out has ended and the source is let go
  // Where the bytes are on the device, once they are back.
  Target target;
  int64_t begin = 0;   // their first byte in it
  bool is_incoming = false;
  Stream stream = nullptr;
  // Against other threads where the GIL is released. One thread may take it again: what the garbage collector runs may
  // drain the engine.
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

// Makes the type. Returns false and leaves a Python error where it cannot.
bool add_swapped_storage_type(PyObject* module);
// A storage whose copy-out has not begun; null, and a Python error, without memory.
PyObject* make_swapped_storage(const std::shared_ptr<Books>& books);
// The copy-out no longer reads the source: lets go of it, unless backward has begun to use it.
bool copied_out(PyObject* self);
// Starts the copy-in to fresh memory, unless the bytes are there or a copy-in is under way.
bool prefetch(PyObject* self, bool* began);
// The bytes, ready for the current stream, and where in the target they begin. One view is served per call.
bool swap_in(PyObject* self, Target* found, int64_t* begin);
// What shares the saved tensors' version counter: a new reference, or null where nobody can change it any more.
PyObject* version_counter(PyObject* self);
// The storage of a target, made where it is a block of the host's: a new reference, or null.
PyObject* storage_of_target(Target& target);
// (owner, version, begin, nbytes, storage): a new reference, or null.
PyObject* to_tuple(const SavedKey& key);

// The ticket as a Python object, which keeps its owner alive: a new reference, or null. Defined in hook_bindings.cpp.
PyObject* to_python(Ticket* ticket, PyObject* owner);
// A host block as a Python object that offers its memory: a new reference, or null. Defined in hook_bindings.cpp.
PyObject* to_python(const std::shared_ptr<HostBlock>& block);

}  // namespace offload
