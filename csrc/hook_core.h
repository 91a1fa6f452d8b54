// Autograd's pack and unpack for tensors that stay, as builtin callables: no Python code runs for a small tensor, a
// parameter, or a tensor that the schedule keeps. Everything else is a method of the Python class that derives from
// HookCore (runtime/hooks.py).
//
// The type is made with Python's C interface, whose calls parse no arguments. Callers hold the GIL. An
// entry that fails leaves a Python error and returns null; no C++ exception leaves this file.
#pragma once

#include <memory>

#include "kept_tensor.h"
#include "schedule_cursor.h"

namespace offload {

// Makes the type HookCore. Returns false and leaves a Python error where it cannot.
bool add_hook_types(PyObject* module);
// Lets `core` decide what `cursor` can, from here on; packs are numbered from here. `observer` is asked the rest.
// `reason` is why tensors stay that the schedule keeps. Returns false and leaves a Python error where `core` is no
// HookCore.
bool follow(PyObject* core, PyObject* observer, std::shared_ptr<ScheduleCursor> cursor, PyObject* reason);

// The C++ object behind a Python `Count`; null, and a Python error, where it is another. Defined in hook_bindings.cpp.
std::shared_ptr<Count> count_of(PyObject* object);

}  // namespace offload
