// The Python bindings of what the planner computes natively.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "placement.h"

namespace py = pybind11;
using namespace offload;

void register_plan(py::module_& module);

namespace {

template <typename Value>
py::tuple tuple_of(const std::vector<Value>& values) {
  py::tuple result(values.size());
  for (size_t i = 0; i < values.size(); ++i) result[i] = values[i];
  return result;
}

py::object place(const Placer& placer, std::vector<int> indices, int64_t limit_bytes, double cutoff_seconds,
                 double safety_factor, const NotBefore& not_before) {
  const auto found = placer.place(std::move(indices), limit_bytes, cutoff_seconds, safety_factor, not_before);
  if (!found) return py::none();
  py::list stalls;
  for (const PlacementStall& stall : found->stalls) {
    stalls.append(py::make_tuple(stall.seconds, stall.node, stall.tensor, stall.is_out));
  }
  return py::make_tuple(found->step_seconds, tuple_of(found->indices), tuple_of(found->releases),
                        tuple_of(found->prefetches), stalls);
}

}  // namespace

void register_plan(py::module_& module) {
  py::class_<Placer>(module, "Placer")
      .def(py::init([](std::vector<int64_t> bytes, std::vector<int> packed, std::vector<int> release_min,
                       std::vector<int> first_backward, std::vector<double> out_seconds, std::vector<double> in_seconds,
                       std::vector<double> overhead_seconds, std::vector<int> copy_in_rank, std::vector<double> seconds,
                       std::vector<int64_t> unswapped_bytes) {
        return Placer({std::move(bytes), std::move(packed), std::move(release_min), std::move(first_backward),
                       std::move(out_seconds), std::move(in_seconds), std::move(overhead_seconds),
                       std::move(copy_in_rank)},
                      std::move(seconds), std::move(unswapped_bytes));
      }))
      .def("headroom",
           [](const Placer& placer, const std::vector<int>& indices, int64_t limit_bytes) {
             const std::vector<int64_t> found = placer.headroom(indices, limit_bytes);
             return py::array_t<int64_t>(static_cast<py::ssize_t>(found.size()), found.data());
           })
      .def("place", &place)
      .def("releases", [](const Placer& placer, std::vector<int> indices, int64_t limit_bytes) {
        return placer.releases(std::move(indices), limit_bytes);
      });
}
