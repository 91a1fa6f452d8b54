// The object that a graph node holds for a kept tensor.
//
// Callers hold the GIL. A function that fails leaves a Python error.
#pragma once

#include "tensor_interface.h"

namespace offload {

// Takes part in garbage collection; runs no Python code when it dies.
struct KeptTensor {
  PyObject_HEAD
  PyObject* tensor;    // detached, or a leaf
  PyObject* version;   // at its pack
  Py_ssize_t index;    // of its pack, if its unpack must be reported; else -1
};

extern PyTypeObject* kept_type;

// Creates the type. False: a Python error.
bool add_kept_type(PyObject* module);
// Creates a record of `tensor`. Null: a Python error (no memory).
PyObject* make_kept(Owned& tensor, Owned& version, Py_ssize_t index);

}  // namespace offload
