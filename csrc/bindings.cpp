// The Python bindings of the data plane, offload._core. Addresses and streams are integers; engine.py provides them.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <functional>

#include "checksum.h"
#include "driver.h"
#include "error.h"
#include "host_block.h"
#include "host_driver.h"
#include "numa.h"
#include "python_errors.h"
#include "swap_store.h"

namespace py = pybind11;
using namespace offload;

void register_hooks(py::module_& module);
void register_plan(py::module_& module);
#ifdef OFFLOAD_MUTANTS
void register_campaign(py::module_& module);
#endif

namespace {

using ReleaseGil = py::call_guard<GilRelease>;

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

LaneOrder lane_order_named(const std::string& name) {
  if (name == "threads") return LaneOrder::threads;
  if (name == "delays") return LaneOrder::delays;
  if (name == "stepped") return LaneOrder::stepped;
  throw std::invalid_argument("schedule must be \"threads\", \"delays\" or \"stepped\", not \"" + name + "\"");
}

py::dict to_dict(const StoreStats& stats) {
  py::dict result;
  result["out_bytes"] = stats.out_bytes;
  result["in_bytes"] = stats.in_bytes;
  result["out_copies"] = stats.out_copies;
  result["in_copies"] = stats.in_copies;
  result["out_transfers"] = stats.out_transfers;
  result["in_transfers"] = stats.in_transfers;
  result["out_seconds"] = stats.out_seconds;
  result["in_seconds"] = stats.in_seconds;
  result["stall_seconds"] = stats.stall_seconds;
  result["spilled_bytes"] = stats.spilled_bytes;
  result["cancelled"] = stats.cancelled;
  result["failed"] = stats.failed;
  result["live_tickets"] = stats.live_tickets;
  result["pool_max_bytes"] = stats.pool.max_bytes;
  result["pool_held_bytes"] = stats.pool.held_bytes;
  result["pool_used_bytes"] = stats.pool.used_bytes;
  result["pool_requested_bytes"] = stats.pool.requested_bytes;
  result["pool_high_water_bytes"] = stats.pool.high_water_bytes;
  result["pool_registration_seconds"] = stats.pool.registration_seconds;
  result["spill_file_bytes"] = stats.spill.file_bytes;
  result["spill_used_bytes"] = stats.spill.used_bytes;
  result["spill_high_water_bytes"] = stats.spill.high_water_bytes;
  result["spill_written_bytes"] = stats.spill.written_bytes;
  result["spill_read_bytes"] = stats.spill.read_bytes;
  return result;
}

PyObject *pool_exhausted, *driver_error, *pinning_failed, *spill_error;

// The Python exceptions have attributes: PoolExhausted .asked_bytes .free_bytes .max_bytes; DriverError .call .code;
// SpillError the OSError fields and .offset.
void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const PoolExhausted& error) {
    py::object instance = py::reinterpret_borrow<py::object>(pool_exhausted)(error.what());
    instance.attr("asked_bytes") = error.asked_bytes;
    instance.attr("free_bytes") = error.free_bytes;
    instance.attr("max_bytes") = error.max_bytes;
    PyErr_SetObject(pool_exhausted, instance.ptr());
  } catch (const DriverError& error) {
    PyObject* const type = dynamic_cast<const PinningFailed*>(&error) != nullptr ? pinning_failed : driver_error;
    py::object instance = py::reinterpret_borrow<py::object>(type)(error.what());
    instance.attr("call") = error.call;
    instance.attr("code") = error.code;
    PyErr_SetObject(type, instance.ptr());
  } catch (const SpillError& error) {
    py::object instance =
        py::reinterpret_borrow<py::object>(spill_error)(error.error_number, error.what(), error.path);
    instance.attr("offset") = error.offset;
    PyErr_SetObject(spill_error, instance.ptr());
  }
}

void register_errors(py::module_& module) {
  pool_exhausted = py::exception<PoolExhausted>(module, "PoolExhausted", PyExc_MemoryError).release().ptr();
  driver_error = py::exception<DriverError>(module, "DriverError", PyExc_RuntimeError).release().ptr();
  pinning_failed = py::exception<PinningFailed>(module, "PinningFailed", driver_error).release().ptr();
  spill_error = py::exception<SpillError>(module, "SpillError", PyExc_OSError).release().ptr();
  py::register_exception_translator(&translate);
}

void register_store(py::module_& module) {
  py::class_<Ticket>(module, "Ticket")
      .def_property_readonly("id", &Ticket::id)
      .def_property_readonly("bytes", &Ticket::bytes)
      .def_property_readonly("state", [](const Ticket& ticket) { return state_name(ticket.state()); })
      .def_property_readonly("failure", &Ticket::failure_text)
      .def("out_done", &Ticket::out_done)
      .def(
          "wait_out", [](Ticket& ticket, uintptr_t compute) { ticket.wait_out(pointer(compute)); }, py::arg("compute"),
          ReleaseGil())
      .def("cancel", &Ticket::cancel)
      .def(
          "prefetch",
          [](Ticket& ticket, uintptr_t target, uintptr_t compute, std::shared_ptr<HostBlock> owner) {
            ticket.prefetch(pointer(target), pointer(compute), std::move(owner));
          },
          py::arg("target"), py::arg("compute"), py::arg("owner") = nullptr, ReleaseGil())
      .def("in_done", &Ticket::in_done)
      .def(
          "swap_in", [](Ticket& ticket, uintptr_t compute) { ticket.swap_in(pointer(compute)); }, py::arg("compute"),
          ReleaseGil())
      .def("settle", &Ticket::settle, ReleaseGil())
      .def("release", &Ticket::release);

  py::class_<SwapStore, std::shared_ptr<SwapStore>>(module, "SwapStore")
      .def_static(
          "direct",
          [](std::shared_ptr<HostDriver> lanes, std::string spill_directory, size_t slice_bytes,
             bool checks_every_byte) {
            StoreOptions options;
            options.spill_directory = std::move(spill_directory);
            options.slice_bytes = slice_bytes;
            options.checks_every_byte = checks_every_byte;
            return SwapStore::create_direct(std::move(lanes), options);
          },
          py::arg("lanes"), py::arg("spill_directory"), py::arg("slice_bytes") = StoreOptions{}.slice_bytes,
          py::arg("checks_every_byte") = false)
      .def_static(
          "slab",
          [](std::shared_ptr<Driver> device, std::shared_ptr<HostDriver> lanes, size_t host_bytes_max,
             std::string spill_directory, size_t slab_bytes, size_t slice_bytes, bool checks_every_byte) {
            return SwapStore::create_slab(std::move(device), std::move(lanes),
                                          {host_bytes_max, slab_bytes, slice_bytes, std::move(spill_directory),
                                           checks_every_byte});
          },
          py::arg("device"), py::arg("lanes"), py::arg("host_bytes_max"), py::arg("spill_directory") = "",
          py::arg("slab_bytes") = StoreOptions{}.slab_bytes, py::arg("slice_bytes") = StoreOptions{}.slice_bytes,
          py::arg("checks_every_byte") = false, ReleaseGil())
      .def(
          "swap_out",
          [](SwapStore& store, uintptr_t source, size_t bytes, uintptr_t compute, uint64_t need) {
            py::object handle = py::cast(Ticket());  // created first: if it fails, no copy has begun
            Ticket& ticket = handle.cast<Ticket&>();
            const GilRelease release;
            ticket = store.swap_out(pointer(source), bytes, pointer(compute), need);
            return handle;
          },
          py::arg("source"), py::arg("bytes"), py::arg("compute"), py::arg("need") = 0)
      .def("quiesce", &SwapStore::quiesce, ReleaseGil())
      // A forked child may have inherited a locked mutex: it gets an error before it could wait for one.
      .def(
          "trim",
          [](SwapStore& store) {
            store.require_same_process();
            return store.trim();
          },
          ReleaseGil())
      .def("trim_pool", &SwapStore::trim_pool, py::arg("keep_bytes"), ReleaseGil())
      .def("restart_high_water", &SwapStore::restart_high_water, ReleaseGil())
      .def("stats",
           [](SwapStore& store) {
             store.require_same_process();
             return to_dict(store.stats());
           })
      .def("defer_copy_outs", &SwapStore::defer_copy_outs, py::arg("defers"), ReleaseGil())
      .def("record_copies", &SwapStore::record_copies, py::arg("limit"), ReleaseGil())
      .def("take_copies",
           [](SwapStore& store) {
             std::vector<CopyEntry> ended;
             {
               const GilRelease release;
               ended = store.take_copies();
             }
             py::list result;
             for (const CopyEntry& each : ended)
               result.append(py::make_tuple(kind_name(each.kind), each.ticket_id, each.bytes, each.begin_seconds,
                                            each.end_seconds));
             return result;
           })
      .def_property_readonly("alignment_bytes", &SwapStore::alignment_bytes);
}

void register_parts(py::module_& module) {
  py::class_<Extent>(module, "Extent").def_readonly("offset", &Extent::offset).def_readonly("bytes", &Extent::bytes);
  py::class_<SpillFile, std::shared_ptr<SpillFile>>(module, "SpillFile")
      .def(py::init<const std::string&>(), py::arg("directory"))
      .def_property_readonly("alignment_bytes", &SpillFile::alignment_bytes)
      .def("allocate", &SpillFile::allocate)
      .def("release", &SpillFile::release)
      .def("write",
           [](SpillFile& file, const Extent& extent, const py::buffer& data) {
             const py::buffer_info view = data.request();
             const GilRelease release;
             return file.write(extent, 0, view.ptr, static_cast<size_t>(view.size * view.itemsize), 0);
           })
      .def("read", [](SpillFile& file, const Extent& extent, const py::buffer& data) {
        const py::buffer_info view = data.request(true);
        const GilRelease release;
        return file.read(extent, 0, view.ptr, static_cast<size_t>(view.size * view.itemsize), 0);
      });

  py::class_<HostBlock, std::shared_ptr<HostBlock>>(module, "HostBlock", py::buffer_protocol())
      .def(py::init<size_t, size_t, size_t>(), py::arg("bytes"), py::arg("alignment_bytes") = kPageBytes,
           py::arg("residue") = 0)
      .def_property_readonly("address",
                             [](const HostBlock& block) { return reinterpret_cast<uintptr_t>(block.data()); })
      .def_buffer([](HostBlock& block) {
        return py::buffer_info(block.data(), 1, py::format_descriptor<uint8_t>::format(),
                               static_cast<py::ssize_t>(block.bytes()));
      });
}

}  // namespace

void offload::raise_in_python() noexcept {
  try {
    try {
      translate(std::current_exception());
    } catch (py::error_already_set& error) {
      error.restore();
    } catch (const std::bad_alloc&) {
      PyErr_NoMemory();
    } catch (const std::invalid_argument& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    } catch (const std::exception& error) {
      PyErr_SetString(PyExc_RuntimeError, error.what());
    }
  } catch (...) {
    PyErr_NoMemory();
  }
}

PYBIND11_MODULE(_core, module) {
  module.doc() = "The data plane of offload: drivers, slab pool, spill file, swap store. Private; see _core.pyi.";
  register_errors(module);

  py::class_<Driver, std::shared_ptr<Driver>>(module, "Driver")
      .def_property_readonly("name", &Driver::name)
      .def("require_not_capturing",
           [](Driver& driver, uintptr_t stream) { driver.require_not_capturing(reinterpret_cast<Stream>(stream)); })
      .def("device_memory", [](Driver& driver) {
        const DeviceMemory memory = driver.device_memory();
        return py::make_tuple(memory.free_bytes, memory.total_bytes);
      });
  py::class_<HostDriver, Driver, std::shared_ptr<HostDriver>>(module, "HostDriver")
      .def(py::init([](const std::string& schedule, uint64_t seed, int niceness, double bandwidth) {
             return HostDriver::create(lane_order_named(schedule), seed, niceness, bandwidth);
           }),
           py::arg("schedule") = "threads", py::arg("seed") = 0, py::arg("niceness") = 0, py::arg("bandwidth") = 0.0);
  module.def(
      "cuda_driver", [](int device, const std::string& library) { return make_cuda_driver(device, library.c_str()); },
      py::arg("device"), py::arg("library") = "libcuda.so.1", ReleaseGil());
  module.def(
      "cuda_device_count", [](const std::string& library) { return cuda_device_count(library.c_str()); },
      py::arg("library") = "libcuda.so.1");
  module.def(
      "cuda_symbols",
      [](const std::string& library) {
        py::list symbols;
        for (const DriverSymbol& symbol : cuda_symbols(library.c_str()))
          symbols.append(py::make_tuple(symbol.name, symbol.required, symbol.found));
        return symbols;
      },
      py::arg("library") = "libcuda.so.1");

  register_parts(module);
  register_store(module);
  register_hooks(module);
  register_plan(module);
#ifdef OFFLOAD_MUTANTS
  register_campaign(module);
#endif
  module.def(
      "numa_node_of_pci",
      [](std::string bus_id, const std::string& sysfs) { return numa_node_of_pci(std::move(bus_id), sysfs); },
      py::arg("bus_id"), py::arg("sysfs") = "/sys");
  module.def(
      "pages_near",
      [](size_t bytes, int node) {
        const std::unique_ptr<char, std::function<void(char*)>> pages(map_pages(bytes, node),
                                                                      [&](char* data) { unmap_pages(data, bytes); });
        return py::bytes(pages.get(), bytes);
      },
      py::arg("bytes"), py::arg("node"));
  module.def(
      "crc32c",
      [](const py::bytes& data, uint32_t crc) {
        const std::string_view view = data;
        return crc32c(crc, view.data(), view.size());
      },
      py::arg("data"), py::arg("crc") = 0);
  module.def(
      "crc32c_of_blocks",
      [](const py::bytes& data, uint64_t offset, uint32_t crc) {
        const std::string_view view = data;
        return crc32c_of_blocks(crc, view.data(), view.size(), offset);
      },
      py::arg("data"), py::arg("offset"), py::arg("crc") = 0);
  module.def(
      "crc32c_portable",
      [](const py::bytes& data, uint32_t crc) {
        const std::string_view view = data;
        return crc32c_portable(crc, view.data(), view.size());
      },
      py::arg("data"), py::arg("crc") = 0);
}
