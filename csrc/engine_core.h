// The part of an engine that every swapped tensor passes: which bytes it shows, its copy-out, and what is collected.
//
// EngineCore is the base class of Engine (runtime/engine.py). Callers hold the GIL; an entry that fails leaves a Python
// error, and no C++ exception leaves this file.
#pragma once

#include <memory>

#include "swap_books.h"
#include "tensor_interface.h"

namespace offload {

// Makes the type EngineCore. Returns false and leaves a Python error where it cannot.
bool add_engine_type(PyObject* module);
// Whether there is nothing to collect; −1, and a Python error, where it is no EngineCore.
int is_quiet(PyObject* engine);

// The C++ object behind a Python `SwapStore`; null, and a Python error, where it is another. Defined in
// hook_bindings.cpp.
std::shared_ptr<SwapStore> store_of(PyObject* object);

}  // namespace offload
