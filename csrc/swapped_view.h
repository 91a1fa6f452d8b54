// One saved tensor whose bytes are swapped out: its size, stride, offset and version. An autograd node holds it.
//
// Created at pack; unpack calls its `restore`. It works with a SwappedStorage and with any Python object that has a
// `record` with `add_view()`, `key`, `empty(dtype)` and `swap_in()`.
//
// Callers hold the GIL; a function that fails sets a Python error.
#pragma once

#include "tensor_interface.h"

namespace offload {

// Creates the type SwappedView and the function view_of(tensor, saved, index). Returns false if there is a Python
// error.
bool add_swapped_view_type(PyObject* module);
// Returns the view of a tensor whose bytes a SwappedStorage has, for the autograd node: a new reference, or null. May
// throw.
PyObject* make_view(PyObject* tensor, PyObject* storage, Py_ssize_t pack_index);
// Swaps in and returns the tensor as it was saved: a new reference, or null. May throw.
PyObject* restore_view(PyObject* view);
// Returns the object that has the bytes: borrowed. Null without an error if `view` is not a SwappedView.
PyObject* saved_of(PyObject* view);
// Returns the pack index of a SwappedView.
Py_ssize_t index_of(PyObject* view);

}  // namespace offload
