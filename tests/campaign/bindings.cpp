// The campaign's Python face, in the mutants' build of offload/_core alone.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdlib>

#include "../faults/faulty_io.h"
#include "mutants.h"
#include "walk.h"

namespace py = pybind11;
using namespace offload;
using namespace offload::campaign;

namespace {

LaneOrder lane_order_named(const std::string& name) {
  if (name == "threads") return LaneOrder::threads;
  if (name == "delays") return LaneOrder::delays;
  if (name == "stepped") return LaneOrder::stepped;
  throw std::invalid_argument("no such schedule: " + name);
}

py::tuple range(const Range& range) { return py::make_tuple(range.address, range.bytes); }

py::list to_list(const std::vector<Entry>& log) {
  static constexpr const char* kNames[] = {"stream_create", "record", "wait",     "event_sync",
                                           "stream_sync",   "kernel", "allocate", "free"};
  py::list result;
  for (const Entry& entry : log)
    result.append(py::make_tuple(kNames[static_cast<int>(entry.kind)], reinterpret_cast<uintptr_t>(entry.stream),
                                 reinterpret_cast<uintptr_t>(entry.event), range(entry.read), range(entry.written),
                                 entry.what));
  return result;
}

}  // namespace

void register_campaign(py::module_& module) {
  // Processes that a test starts are broken as it is.
  if (const char* edge = std::getenv("OFFLOAD_BROKEN_EDGE")) mutants::break_edge(edge);
  module.def("set_mutant", &mutants::break_edge, py::arg("edge"));
  module.def("set_pause", [](unsigned most_us) { faults::FaultyIo::pause_us_max = most_us; }, py::arg("most_us"));
  module.def(
      "walk",
      [](const std::string& tier, const std::string& schedule, uint64_t seed, int steps, const std::string& directory,
         bool log) {
        WalkResult result;
        {
          py::gil_scoped_release release;
          result = walk({tier, lane_order_named(schedule), seed, steps, directory});
        }
        py::dict answer;
        answer["failure"] = result.failure;
        answer["returned"] = result.returned;
        answer["faults"] = result.faults;
        answer["digest"] = result.digest;
        if (log) answer["log"] = to_list(result.log);
        return answer;
      },
      py::arg("tier"), py::arg("schedule"), py::arg("seed"), py::arg("steps"), py::arg("directory"),
      py::arg("log") = false);
}
