// The object that an autograd node holds for a kept tensor.
//
// Callers hold the GIL. A function that fails sets a Python error.
#pragma once

#include "tensor_interface.h"

namespace offload {

// Only autograd nodes hold it, which the garbage collector cannot see into, so it takes no part in garbage collection.
// Its deallocation runs no Python code.
struct KeptTensor {
  PyObject_HEAD
  PyObject* tensor;    // detached, or a leaf
  PyObject* version;   // the tensor's version when it was packed
  Py_ssize_t index;    // pack index, if the unpack must be reported; otherwise -1
};

extern PyTypeObject* kept_type;

// Creates the type. Returns false if there is a Python error.
bool add_kept_type(PyObject* module);
// Creates a record of `tensor`, and takes both references. Null: a Python error (no memory).
PyObject* make_kept(Owned& tensor, Owned& version, Py_ssize_t index);

}  // namespace offload
