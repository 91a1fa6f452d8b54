// Whether a model's parameters and buffers are those of the last look: the same tensors on the same storages.
//
// Off the data path: once per step (profiling/model_state.py), so that what Python computes of hundreds of tensors is
// computed when they change. Nothing is taken for granted between looks: each reads every module's dictionaries, and of
// every tensor the storage, its size and the device.
//
// Callers hold the GIL.
#pragma once

#include "tensor_interface.h"

namespace offload {

// Makes the type StateWatch and the function first_tensor. Returns false and leaves a Python error where it cannot.
bool add_state_watch_type(PyObject* module);

}  // namespace offload
