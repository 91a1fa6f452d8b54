// `Gauge` as a Python type: swapping one tensor counts six times, so that a call must parse nothing.
//
// Callers hold the GIL.
#pragma once

#include <memory>

#include "gauge.h"
#include "tensor_interface.h"

namespace offload {

// Makes the type Gauge. Returns false and leaves a Python error where it cannot.
bool add_gauge_type(PyObject* module);
// The gauge of a Python object, which it keeps alive; null, and a Python error, where it is no Gauge. The last holder
// lets go of it with the GIL held.
std::shared_ptr<Gauge> gauge_of(PyObject* object);

}  // namespace offload
