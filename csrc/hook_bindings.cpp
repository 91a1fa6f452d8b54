// Python bindings of the data that the hooks share with C++: counts, the compiled schedule, a step's position in it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <tuple>

#include "dlpack_api.h"
#include "engine_core.h"
#include "gauge_type.h"
#include "hook_core.h"
#include "operator_follower.h"
#include "operator_values.h"
#include "schedule_cursor.h"
#include "saved_identity.h"
#include "state_watch.h"
#include "step_copies.h"
#include "swapped_storage.h"
#include "swapped_view.h"

namespace py = pybind11;

namespace offload {

std::shared_ptr<Count> count_of(PyObject* object) {
  try {
    return py::cast<std::shared_ptr<Count>>(py::handle(object));
  } catch (const py::cast_error&) {
    PyErr_SetString(PyExc_TypeError, "expected a Count");
    return nullptr;
  }
}

std::shared_ptr<SwapStore> store_of(PyObject* object) {
  try {
    return py::cast<std::shared_ptr<SwapStore>>(py::handle(object));
  } catch (const py::cast_error&) {
    PyErr_SetString(PyExc_TypeError, "an engine takes a SwapStore");
    return nullptr;
  }
}

PyObject* to_python(Ticket* ticket, PyObject* owner) {
  return py::cast(ticket, py::return_value_policy::reference_internal, owner).release().ptr();
}

PyObject* to_python(const std::shared_ptr<HostBlock>& block) { return py::cast(block).release().ptr(); }

}  // namespace offload

using namespace offload;

namespace {

// Makes a call when it is freed. A `threading.local` that holds it is emptied in the thread that ends. In C++, because
// Python code that runs there could be interrupted by a signal's handler, whose exception would be lost.
class CallWhenFreed {
 public:
  explicit CallWhenFreed(py::object call) : call_(std::move(call)) {}
  CallWhenFreed(const CallWhenFreed&) = delete;
  ~CallWhenFreed() {
    if (!call_) return;
    try {
      call_();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("CallWhenFreed");
    }
  }
  void cancel() { call_ = py::object(); }

 private:
  py::object call_;
};

// Counts of one session. At the beginning of a step their values are stored.
struct CountList {
  std::vector<std::shared_ptr<Count>> counts;
  void begin_step() const {
    for (const std::shared_ptr<Count>& count : counts) {
      count->tensors_before = count->tensors;
      count->nbytes_before = count->nbytes;
    }
  }
};

void register_counts(py::module_& module) {
  py::class_<Count, std::shared_ptr<Count>>(module, "Count")
      .def(py::init([](int64_t tensors, int64_t nbytes) { return Count{tensors, nbytes}; }), py::arg("tensors") = 0,
           py::arg("nbytes") = 0)
      .def_readwrite("tensors", &Count::tensors)
      .def_readwrite("nbytes", &Count::nbytes)
      .def("copy", [](const Count& count) { return count; })
      .def("in_step",
           [](const Count& count) {
             return Count{count.tensors - count.tensors_before, count.nbytes - count.nbytes_before};
           })
      .def("to_dict",
           [](const Count& count) {
             py::dict result;
             result["tensors"] = count.tensors;
             result["bytes"] = count.nbytes;
             return result;
           })
      .def("__eq__",
           [](const Count& count, const Count& other) {
             return count.tensors == other.tensors && count.nbytes == other.nbytes;
           })
      .def(py::pickle([](const Count& count) { return py::make_tuple(count.tensors, count.nbytes); },
                      [](const py::tuple& state) {
                        return Count{state[0].cast<int64_t>(), state[1].cast<int64_t>()};
                      }))
      .def("__repr__", [](const Count& count) {
        return "Count(tensors=" + std::to_string(count.tensors) + ", nbytes=" + std::to_string(count.nbytes) + ")";
      });
  py::class_<CountList>(module, "CountList")
      .def(py::init<>())
      .def("add", [](CountList& list, std::shared_ptr<Count> count) { list.counts.push_back(std::move(count)); })
      .def("begin_step", &CountList::begin_step);
}

py::object measure_clock(NodeClock& clock, size_t count) {
  const std::optional<StepTimes> times = clock.measure(count);
  if (!times) return py::none();
  return py::make_tuple(py::tuple(py::cast(times->starts)), py::tuple(py::cast(times->node_seconds)), times->waits,
                        times->stall_seconds, times->step_seconds);
}

void register_step(py::module_& module) {
  py::class_<PackTable, std::shared_ptr<PackTable>>(module, "PackTable")
      .def(py::init<>())
      .def("keep", [](PackTable& table, size_t index, int64_t nbytes) { table.at(index).kept_bytes = nbytes; })
      .def("keep_again", [](PackTable& table, size_t index) { table.at(index).is_kept_again = true; })
      .def("begin_node", [](PackTable& table, size_t index, int64_t node) { table.at(index).node_after = node; })
      .def("weigh", [](PackTable& table, size_t index, int64_t node) { table.at(index).weighed = node; })
      .def("watch", [](PackTable& table, size_t index, int64_t node) { table.at(index).watched = node; })
      .def("swap", [](PackTable& table, size_t index) { table.at(index).is_swapped = true; })
      .def("swap_out",
           [](PackTable& table, size_t index, int64_t nbytes, uint64_t need) {
             table.at(index).swapped_bytes = nbytes;
             table.at(index).need = need;
           })
      .def("record", [](PackTable& table, size_t index) { table.at(index).is_recorded = true; })
      .def("show_again", [](PackTable& table, size_t index, int64_t first) { table.at(index).first = first; })
      .def("release",
           [](PackTable& table, int64_t node, int64_t index) { table.releases.push_back({node, -1, index}); })
      .def("prefetch", [](PackTable& table, int64_t node, int64_t use, int64_t index) {
        table.prefetches.push_back({node, use, index});
      })
      .def_readwrite("waits_for_prefetches", &PackTable::waits_for_prefetches);
  py::class_<NodeClock, std::shared_ptr<NodeClock>>(module, "NodeClock")
      .def("begin", &NodeClock::begin)
      .def("arrive", &NodeClock::arrive)
      .def("pass_by", &NodeClock::pass_by)
      .def("end", [](NodeClock& clock, std::optional<int64_t> index) { clock.end(index.value_or(-1)); })
      .def("finish", &NodeClock::finish)
      .def_readwrite("is_listening", &NodeClock::is_listening)
      .def("measure", &measure_clock)
      .def_property_readonly("hook_seconds", &NodeClock::hook_seconds);
  py::class_<HostClock, NodeClock, std::shared_ptr<HostClock>>(module, "HostClock").def(py::init<>());
  py::class_<EventPool, std::shared_ptr<EventPool>>(module, "EventPool").def(py::init<std::shared_ptr<Driver>>());
  py::class_<DeviceClock, NodeClock, std::shared_ptr<DeviceClock>>(module, "DeviceClock")
      .def(py::init([](std::shared_ptr<EventPool> events, uintptr_t stream) {
             return std::make_shared<DeviceClock>(std::move(events), reinterpret_cast<Stream>(stream));
           }),
           py::arg("events"), py::arg("stream"))
      .def("move_to", [](DeviceClock& clock, uintptr_t stream) { clock.move_to(reinterpret_cast<Stream>(stream)); });
  py::class_<NodeBytes, std::shared_ptr<NodeBytes>>(module, "NodeBytes").def(py::init<std::vector<int64_t>>());
  py::class_<ActivationMeter, std::shared_ptr<ActivationMeter>>(module, "ActivationMeter")
      .def(py::init([](std::shared_ptr<NodeBytes> bytes, py::handle resident, py::handle steps, bool is_on) {
             auto found = gauge_of(resident.ptr());
             auto begun = found != nullptr ? gauge_of(steps.ptr()) : nullptr;
             if (begun == nullptr) throw py::error_already_set();
             return std::make_shared<ActivationMeter>(std::move(bytes), std::move(found), std::move(begun), is_on);
           }),
           py::arg("kept"), py::arg("resident"), py::arg("steps"), py::arg("is_on"))
      .def("weigh", &ActivationMeter::weigh, py::arg("node"), py::arg("more_bytes") = 0)
      .def_readwrite("stayed_bytes", &ActivationMeter::stayed_bytes)
      .def_readonly("peak_bytes", &ActivationMeter::peak_bytes)
      .def_readonly("is_on", &ActivationMeter::is_on);
  py::class_<ScheduleCursor, std::shared_ptr<ScheduleCursor>>(module, "ScheduleCursor")
      .def(py::init<std::shared_ptr<PackTable>, std::shared_ptr<NodeClock>, std::shared_ptr<ActivationMeter>>(),
           py::arg("table"), py::arg("clock") = nullptr, py::arg("meter") = nullptr)
      .def("watches", &ScheduleCursor::watches)
      .def("arrive", &ScheduleCursor::arrive)
      .def("ask", [](ScheduleCursor& cursor, int64_t index) { return static_cast<int>(cursor.ask(index)); })
      .def("has_used", &ScheduleCursor::has_used)
      .def("forget_uses", &ScheduleCursor::forget_uses)
      .def_readwrite("node", &ScheduleCursor::node)
      .def_readwrite("next_due", &ScheduleCursor::next_due)
      .def_readwrite("is_on_schedule", &ScheduleCursor::is_on_schedule);
  py::class_<StepCopies, std::shared_ptr<StepCopies>>(module, "StepCopies")
      .def(py::init([](std::shared_ptr<ScheduleCursor> cursor, py::handle prefetched, py::handle without_memory) {
             auto begun = gauge_of(prefetched.ptr());
             auto failed = begun != nullptr ? gauge_of(without_memory.ptr()) : nullptr;
             if (failed == nullptr) throw py::error_already_set();
             return std::make_shared<StepCopies>(std::move(cursor), std::move(begun), std::move(failed));
           }),
           py::arg("cursor"), py::arg("prefetched"), py::arg("without_memory"))
      .def("add",
           [](StepCopies& copies, int64_t index, py::handle storage, py::handle source) {
             if (!copies.add(index, storage.ptr(), source.ptr())) throw py::error_already_set();
           })
      .def("find_held",
           [](StepCopies& copies) {
             std::set<int64_t> held;
             if (!copies.find_held(&held)) throw py::error_already_set();
             return held;
           })
      .def("find",
           [](const StepCopies& copies, int64_t index) {
             Owned found = copies.find(index);
             return found ? py::reinterpret_steal<py::object>(found.release()) : py::object(py::none());
           })
      .def("act",
           [](StepCopies& copies, int64_t node) {
             if (!copies.act(node)) throw py::error_already_set();
           })
      .def("call_at",
           [](StepCopies& copies, std::vector<StepCopies::CallPoint> calls, py::object callback) {
             copies.call_at(std::move(calls), Owned(callback.release().ptr()));
           })
      .def("rewind", &StepCopies::rewind)
      .def_readwrite("caps_in_flight", &StepCopies::caps_in_flight)
      .def_readwrite("finds_held", &StepCopies::finds_held)
      .def_readonly("missed", &StepCopies::missed)
      .def("miss", [](StepCopies& copies, int64_t index) { copies.missed.insert(index); });
}

py::object shared(const py::kwargs& given, const char* name) {
  if (!given.contains(name)) throw py::type_error(std::string("set_tensor_interface wants ") + name);
  return given[name];
}

// Returns a reference that is never released.
PyObject* kept(const py::kwargs& given, const char* name) { return shared(given, name).release().ptr(); }

PyObject* descriptor(const py::kwargs& given, const char* name) {
  if (Py_TYPE(shared(given, name).ptr())->tp_descr_get == nullptr)
    throw py::type_error(std::string("set_tensor_interface wants a descriptor as ") + name);
  return kept(given, name);
}

void set_tensor_interface(const py::kwargs& given) {
  TensorInterface found;
  const std::pair<PyObject**, const char*> descriptors[] = {
      {&found.layout, "layout"},     {&found.is_nested, "is_nested"}, {&found.nbytes, "nbytes"},
      {&found.base, "base"},         {&found.version, "version"},     {&found.is_leaf, "is_leaf"},
      {&found.data, "data"},         {&found.dtype, "dtype"},         {&found.itemsize, "itemsize"},
      {&found.shape, "shape"},       {&found.identity, "identity"},   {&found.storage_identity, "storage_identity"},
      {&found.device, "device"},     {&found.gradient, "gradient"},   {&found.requires_grad, "requires_grad"}};
  const std::pair<PyObject**, const char*> objects[] = {{&found.tensor_type, "tensor_type"},
                                                        {&found.parameter_type, "parameter_type"},
                                                        {&found.out_of_memory, "out_of_memory"},
                                                        {&found.strided, "strided"},
                                                        {&found.is_view, "is_view"},
                                                        {&found.detach, "detach"},
                                                        {&found.untyped_storage, "untyped_storage"},
                                                        {&found.stride, "stride"},
                                                        {&found.storage_offset, "storage_offset"},
                                                        {&found.is_conj, "is_conj"},
                                                        {&found.is_neg, "is_neg"},
                                                        {&found.is_inference, "is_inference"},
                                                        {&found.conjugated, "conjugated"},
                                                        {&found.negated, "negated"},
                                                        {&found.type_name, "type_name"},
                                                        {&found.set_storage, "set_storage"},
                                                        {&found.storage_nbytes, "storage_nbytes"},
                                                        {&found.storage_address, "storage_address"},
                                                        {&found.storage_of_buffer, "storage_of_buffer"},
                                                        {&found.watch_storage, "watch_storage"},
                                                        {&found.storage_is_gone, "storage_is_gone"},
                                                        {&found.unwatch_storage, "unwatch_storage"},
                                                        {&found.watched_storage, "watched_storage"},
                                                        {&found.empty, "empty"},
                                                        {&found.raise_changed, "raise_changed"}};
  for (const auto& [place, name] : descriptors) *place = descriptor(given, name);
  for (const auto& [place, name] : objects) *place = kept(given, name);
  if (!shared(given, "storage_holders").is_none()) found.storage_holders = kept(given, "storage_holders");
  found.holders_alone = shared(given, "holders_alone").cast<int64_t>();
  tensors = found;
}

// Returns null if the interface has another major version.
const dlpack::ExchangeApi* api_of(const py::object& capsule) {
  void* const found = PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName);
  if (found == nullptr) throw py::error_already_set();
  const auto* const api = static_cast<const dlpack::ExchangeApi*>(found);
  return api->version.major == dlpack::kMajorVersion ? api : nullptr;
}

}  // namespace

void register_hooks(py::module_& module) {
  PyObject* const target = module.ptr();
  if (!add_kept_type(target) || !add_gauge_type(target) || !add_hook_types(target) || !add_engine_type(target) ||
      !add_swapped_storage_type(target) || !add_swapped_view_type(target) || !add_identity_functions(target) ||
      !add_state_watch_type(target) || !add_value_types(target) || !add_follower_types(target))
    throw py::error_already_set();
  register_counts(module);
  register_step(module);
  py::class_<CallWhenFreed>(module, "CallWhenFreed")
      .def(py::init<py::object>())
      .def("cancel", &CallWhenFreed::cancel);
  module.def("set_tensor_interface", &set_tensor_interface);
  module.def("set_dlpack", [](const py::object& capsule) {
    dlpack::api = capsule.is_none() ? nullptr : api_of(capsule);
    return dlpack::api != nullptr;
  });
  module.def(
      "follow",
      [](py::handle core, py::handle observer, std::shared_ptr<ScheduleCursor> cursor, py::handle reason,
         std::shared_ptr<StepCopies> copies, py::handle held) {
        if (!follow(core.ptr(), observer.ptr(), std::move(cursor), reason.ptr(), std::move(copies), held.ptr()))
          throw py::error_already_set();
      },
      py::arg("core"), py::arg("observer"), py::arg("cursor").none(true), py::arg("reason"),
      py::arg("copies") = nullptr, py::arg("held") = py::none());
}
