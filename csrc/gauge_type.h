// `Gauge` as a Python type. Swapping one tensor changes gauges six times, so its methods parse no arguments.
//
// Callers hold the GIL.
#pragma once

#include <memory>

#include "gauge.h"
#include "tensor_interface.h"

namespace offload {

// Creates the types Gauge and GaugeShare. Returns false if there is a Python error.
bool add_gauge_type(PyObject* module);
// Returns the gauge of a Python object, and keeps the object alive. Null: a Python error (not a Gauge). The last
// reference must be released with the GIL held.
std::shared_ptr<Gauge> gauge_of(PyObject* object);

}  // namespace offload
