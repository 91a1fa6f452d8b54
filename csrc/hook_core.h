// Autograd's pack and unpack for tensors that stay, as builtin callables: no Python code runs for a small tensor, a
// parameter, or a tensor that the schedule keeps. Everything else is a method of the Python class that derives from
// HookCore (runtime/hooks.py).
//
// The types are made with Python's C interface, without pybind11's handling of arguments. Callers hold the GIL. An
// entry that fails leaves a Python error and returns null; no C++ exception leaves this file.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <memory>

#include "schedule_cursor.h"

namespace offload {

// What is asked of a tensor, as attributes of its class: found once, and called without a search. References are kept
// for good.
struct TensorInterface {
  PyObject* tensor_type = nullptr;
  PyObject* parameter_type = nullptr;
  PyObject* strided = nullptr;  // the layout of tensors that can move
  // Descriptors.
  PyObject* layout = nullptr;
  PyObject* is_nested = nullptr;
  PyObject* nbytes = nullptr;
  PyObject* base = nullptr;
  PyObject* version = nullptr;
  PyObject* is_leaf = nullptr;
  // Callables that take the tensor.
  PyObject* is_view = nullptr;
  PyObject* detach = nullptr;
};

// Makes the types HookCore and KeptTensor. Returns false and leaves a Python error where it cannot.
bool add_hook_types(PyObject* module);
void set_tensor_interface(const TensorInterface& interface);
// Lets `core` decide what `cursor` can, from here on; packs are numbered from here. `observer` is asked the rest.
// `reason` is why tensors stay that the schedule keeps. Returns false and leaves a Python error where `core` is no
// HookCore.
bool follow(PyObject* core, PyObject* observer, std::shared_ptr<ScheduleCursor> cursor, PyObject* reason);

// The C++ object behind a Python `Count`; null, and a Python error, where it is another. Defined in hook_bindings.cpp.
std::shared_ptr<Count> count_of(PyObject* object);

}  // namespace offload
