// _faults: how Python tests bring faults into a store's spill file, and have it watched. Built apart from offload/_core, which has none of
// it.
#include <pybind11/pybind11.h>
#include <unistd.h>

#include <cerrno>
#include <memory>
#include <string>
#include <system_error>

#include "faulty_io.h"
#include "swap_store.h"
#include "watched_io.h"

namespace py = pybind11;
using namespace offload;
using namespace offload::faults;

namespace {

SpillFile& file_of(SwapStore& store) {
  if (store.spill_file() == nullptr) throw std::invalid_argument("this store has no spill file");
  return *store.spill_file();
}

Fault fault_named(const std::string& operation, const std::string& kind) {
  Fault fault;
  fault.operation = operation == "allocate" ? Operation::allocate
                    : operation == "write"  ? Operation::write
                    : operation == "read"   ? Operation::read
                                            : throw std::invalid_argument("operation: allocate, write or read");
  fault.kind = kind == "error"            ? Kind::error
               : kind == "short_transfer" ? Kind::short_transfer
               : kind == "wrong_block"    ? Kind::wrong_block
                                          : throw std::invalid_argument("kind: error, short_transfer or wrong_block");
  return fault;
}

void inject(SwapStore& store, const std::string& operation, const std::string& kind, uint64_t nth, int error_number,
            bool persistent) {
  Fault fault = fault_named(operation, kind);
  fault.nth = nth;
  fault.error_number = error_number;
  fault.persistent = persistent;
  SpillFile& file = file_of(store);
  if (dynamic_cast<FaultyIo*>(&file.io()) == nullptr) file.replace_io(std::make_shared<FaultyIo>());
  dynamic_cast<FaultyIo&>(file.io()).inject(fault);
}

void truncate_file(SwapStore& store, uint64_t bytes) {
  if (ftruncate(file_of(store).descriptor(), static_cast<off_t>(bytes)) != 0)
    throw std::system_error(errno, std::generic_category(), "cannot truncate");
}

void watch(SwapStore& store, const std::string& machine) {
  if (store.spill_file() != nullptr) store.spill_file()->replace_io(std::make_shared<WatchedIo>(machine));
}

}  // namespace

PYBIND11_MODULE(_faults, module) {
  module.def("inject", &inject, py::arg("store"), py::arg("operation"), py::arg("kind"), py::arg("nth") = 1,
             py::arg("error_number") = 0, py::arg("persistent") = false);
  module.def("watch", &watch, py::arg("store"), py::arg("machine"));
  module.def("truncate", &truncate_file, py::arg("store"), py::arg("bytes"));
}
