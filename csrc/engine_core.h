// The part of an engine that runs for every swapped tensor: finds its storage, starts its copy-out, frees its source.
//
// EngineCore is the base class of Engine (runtime/engine.py). Callers hold the GIL. A function that fails sets a Python
// error; only swap_out below also throws C++ exceptions.
#pragma once

#include <memory>

#include "swap_books.h"
#include "tensor_interface.h"

namespace offload {

// Creates the type EngineCore. Returns false if there is a Python error.
bool add_engine_type(PyObject* module);
// Returns whether there is nothing to collect; −1: a Python error (not an EngineCore).
int is_quiet(PyObject* engine);
// Returns the records of an EngineCore; null, and a Python error, for any other object.
std::shared_ptr<Books> books_of_engine(PyObject* engine);
// Finds the key of a tensor of `nbytes` bytes, and the SwappedStorage that has its bytes already (borrowed, or null).
// Returns 1; 0: the tensor has no key; −1: a Python error.
int find_saved(Books& books, PyObject* tensor, int64_t nbytes, SavedIdentity* found, PyObject** known);
// Starts the copy-out of a tensor with that identity. Returns its SwappedStorage; null: a Python error. Throws the
// errors of the store, and std::bad_alloc.
PyObject* swap_out(const std::shared_ptr<Books>& books, PyObject* tensor, const SavedIdentity& identity, uint64_t need);

// Returns the C++ object of a Python `SwapStore`. Null: a Python error (another type). Defined in hook_bindings.cpp.
std::shared_ptr<SwapStore> store_of(PyObject* object);

}  // namespace offload
