// What a graph node holds in the place of a tensor that stays.
//
// Callers hold the GIL. A function that fails leaves a Python error.
#pragma once

#include "tensor_interface.h"

namespace offload {

// Takes part in garbage collection; runs no Python code when it dies.
struct KeptTensor {
  PyObject_HEAD
  PyObject* tensor;    // without its history
  PyObject* version;   // at its pack
  Py_ssize_t index;    // of its pack, where its unpack is to be told; else -1
};

extern PyTypeObject* kept_type;

// Makes the type. Returns false and leaves a Python error where it cannot.
bool add_kept_type(PyObject* module);
// A record of `tensor`, which has no history; null, and a Python error, without memory.
PyObject* make_kept(Owned& tensor, Owned& version, Py_ssize_t index);

}  // namespace offload
