// One saved tensor whose bytes are swapped out: its size, stride, offset and version. An autograd node holds it.
//
// Created at pack; unpack calls its `restore`. It works with a SwappedStorage and with any Python object that has a
// `record` with `add_view()`, `key`, `empty(dtype)` and `swap_in()`.
//
// Callers hold the GIL; a function that fails sets a Python error.
#pragma once

#include <cstdint>

#include "dlpack_api.h"
#include "tensor_interface.h"

namespace offload {

// Creates the type SwappedView and the function view_of(tensor, saved, index). Returns false if there is a Python
// error.
bool add_swapped_view_type(PyObject* module);
// Creates the view of a tensor, for the autograd node: a new reference, or null. Null without an error if, according to
// `described`, an element is not a whole number of bytes. The view is incomplete until `attach_view` gives it a
// storage.
PyObject* make_view(PyObject* tensor, const dlpack::Tensor& described, Py_ssize_t pack_index);
// Completes a view. `storage`: the SwappedStorage that has the view's bytes. `version`: the tensor's version at pack.
// `address`: the address of the tensor's first element at pack.
void attach_view(PyObject* view, PyObject* storage, int64_t version, uintptr_t address);
// Returns the number of bytes from a view's first element to its last one, both included.
int64_t span_of(PyObject* view);
// Returns a view's dtype: borrowed.
PyObject* dtype_of(PyObject* view);
// Swaps in and returns the tensor as it was saved: a new reference, or null. May throw.
PyObject* restore_view(PyObject* view);
// Returns the object that has the bytes: borrowed. Null without an error if `view` is not a SwappedView.
PyObject* saved_of(PyObject* view);
// Returns the pack index of a SwappedView.
Py_ssize_t index_of(PyObject* view);

}  // namespace offload
