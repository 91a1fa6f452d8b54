// Autograd's pack and unpack hooks for kept tensors, as builtin callables: no Python code runs for a small tensor, a
// parameter, or a tensor that the schedule keeps. For all other tensors they call methods of the Python class that
// derives from HookCore (runtime/hooks.py).
//
// The type uses Python's C interface, whose calls parse no arguments. Callers hold the GIL. A function that fails sets a
// Python error and returns null; no C++ exception leaves this file.
#pragma once

#include <memory>

#include "kept_tensor.h"
#include "schedule_cursor.h"
#include "step_copies.h"

namespace offload {

// Creates the type HookCore. False: a Python error.
bool add_hook_types(PyObject* module);
// From the next pack on, which gets number 0, `core` uses `cursor` to decide; `observer` decides the rest. `reason`:
// why the schedule keeps tensors, for the report. With `copies`, swapped tensors too are packed and unpacked in C++, if
// the step runs as recorded; `held` lists the storages that something else holds. False: a Python error (`core` is not
// a HookCore).
bool follow(PyObject* core, PyObject* observer, std::shared_ptr<ScheduleCursor> cursor, PyObject* reason,
            std::shared_ptr<StepCopies> copies, PyObject* held);

// The C++ object of a Python `Count`. Null: a Python error (another type). Defined in hook_bindings.cpp.
std::shared_ptr<Count> count_of(PyObject* object);

}  // namespace offload
