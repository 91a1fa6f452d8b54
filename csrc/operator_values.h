// The records of a storage: StorageWatch, which shows whether the storage has been freed, and Value, one version of it.
//
// offload/recomputation/values.py explains the terms. Recording makes several of these for each operator, so they are
// C types. Callers hold the GIL; a function that fails returns null and sets a Python error.
#pragma once

#include "tensor_interface.h"

namespace offload {

// One version of one storage, which recipes may read or compute.
struct Value {
  PyObject_HEAD
  PyObject* call;   // the recorded call that made the value; None: the value existed before
  PyObject* place;  // number of the call's result, or (position, number) of an argument that the call wrote
  PyObject* watch;  // StorageWatch that reserves the storage's address, or None
  PyObject* slot;   // weak reference to the swapped or dropped storage that has the bytes, or None
  PyObject* probe;  // with `slot`: a Probe, which shows whether the tensor was changed in place after its pack
  PyObject* held;   // a kept tensor that has the bytes, or None
  Py_ssize_t index;  // index of the pack that saved the value; -1: none
  long long nbytes;  // bytes of the storage
  long long version;
};

// Returns a weak reference to a storage. It reserves the address, not the bytes, until it is closed or freed.
PyObject* make_watch(PyObject* storage);
// Returns a value that no pack has saved yet, without a call and a place: the operator that made it follows a template.
PyObject* make_value(int64_t version, PyObject* watch);
// Returns null without an error if the object is not a Value.
Value* as_value(PyObject* object);

// Adds StorageWatch and Value to the module. Returns false with a Python error on failure.
bool add_value_types(PyObject* module);

}  // namespace offload
