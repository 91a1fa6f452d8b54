// What recording keeps of a storage: StorageWatch, which tells when it is freed, and Value, one version of it.
//
// offload/recomputation/values.py explains the terms. Recording makes several of these for each operator, so they are
// C types. Callers hold the GIL; a function that fails returns null and leaves a Python error.
#pragma once

#include "tensor_interface.h"

namespace offload {

// One version of one storage, as recipes read or make it.
struct Value {
  PyObject_HEAD
  PyObject* call;   // of the operator that made it; None: it was there before
  PyObject* place;  // number of a result, or (position, number) of an argument that the operator wrote
  PyObject* watch;  // reserves the storage's address; None: there is none
  PyObject* slot;   // where the bytes are: a weak reference to what a pack swapped or dropped, or None
  PyObject* probe;  // of what has a slot
  PyObject* held;   // a tensor that stays, or None
  Py_ssize_t index;  // of the pack that saved it; -1: none has
  long long nbytes;  // of the storage
  long long version;
};

// A weak reference to a storage. Reserves its address, not its bytes, until it is closed or freed.
PyObject* make_watch(PyObject* storage);
// A value that nothing has packed. Neither a call nor a place: an operator that follows a template made it.
PyObject* make_value(int64_t version, PyObject* watch);
// Null without an error: the object is no Value.
Value* as_value(PyObject* object);

// Adds StorageWatch and Value to the module. Returns false with a Python error on failure.
bool add_value_types(PyObject* module);

}  // namespace offload
