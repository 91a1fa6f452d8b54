// One saved tensor whose bytes are swapped out: its size, stride, offset and version. The graph node holds it.
//
// Created at pack; unpack calls its `restore`. It works with a SwappedStorage and with any Python object that has a
// `record` with `add_view()`, `key`, `empty(dtype)` and `swap_in()`.
//
// Callers hold the GIL; an entry that fails leaves a Python error.
#pragma once

#include "tensor_interface.h"

namespace offload {

// Creates the type SwappedView and the function view_of(tensor, saved, index). False: a Python error.
bool add_swapped_view_type(PyObject* module);
// What the graph node holds for a tensor whose bytes a SwappedStorage has: a new reference, or null. May throw.
PyObject* make_view(PyObject* tensor, PyObject* storage, Py_ssize_t pack_index);
// The tensor as it was saved: a new reference, or null. May throw.
PyObject* restore_view(PyObject* view);
// What has the bytes: borrowed; null where it is no SwappedView.
PyObject* saved_of(PyObject* view);
Py_ssize_t index_of(PyObject* view);

}  // namespace offload
