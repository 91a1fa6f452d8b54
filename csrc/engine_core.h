// The part of an engine that runs for every swapped tensor: finds its storage, starts its copy-out, frees its source.
//
// EngineCore is the base class of Engine (runtime/engine.py). Callers hold the GIL; an entry that fails leaves a Python
// error, and no C++ exception leaves this file.
#pragma once

#include <memory>

#include "swap_books.h"
#include "tensor_interface.h"

namespace offload {

// Creates the type EngineCore. False: a Python error.
bool add_engine_type(PyObject* module);
// Whether there is nothing to collect; −1: a Python error (not an EngineCore).
int is_quiet(PyObject* engine);
// The books of an EngineCore; null, and a Python error, where it is none.
std::shared_ptr<Books> books_of_engine(PyObject* engine);
// The key of a tensor of so many bytes, and the SwappedStorage that has its bytes already: borrowed, or null. 0: there
// is no key; −1: a Python error.
int find_saved(Books& books, PyObject* tensor, int64_t nbytes, SavedKey* key, PyObject** known);
// Starts the copy-out of a tensor with that key: a SwappedStorage, or null. Errors of the store are C++ exceptions.
PyObject* swap_out(const std::shared_ptr<Books>& books, PyObject* tensor, const SavedKey& key, uint64_t need);

// The C++ object of a Python `SwapStore`. Null: a Python error (another type). Defined in hook_bindings.cpp.
std::shared_ptr<SwapStore> store_of(PyObject* object);

}  // namespace offload
