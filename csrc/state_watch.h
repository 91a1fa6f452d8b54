// Detects whether a model's parameters and buffers have changed since the last call: other tensors, or other storages.
//
// It is called once per step (profiling/model_state.py), not on the data path. Sets and sums over hundreds of tensors
// are then computed in Python only if something has changed. Each call reads every module's dictionaries, and every
// tensor's storage, size and device.
//
// Callers hold the GIL.
#pragma once

#include "tensor_interface.h"

namespace offload {

// Adds the type StateWatch and the function first_tensor to the module. Returns false if there is a Python error.
bool add_state_watch_type(PyObject* module);

}  // namespace offload
