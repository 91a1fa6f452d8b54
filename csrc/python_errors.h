// Between C++ and Python: errors, and the interpreter's lock. For entries that parse no arguments.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cxxabi.h>

namespace offload {

// Makes the C++ exception that is being handled a Python error. Defined in bindings.cpp.
void raise_in_python() noexcept;

// Lets Python run meanwhile. A thread that comes back while the interpreter shuts down is ended by it on the spot, by
// unwinding its stack: a guard that forbids that in its destructor would abort the process.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;
  ~GilRelease() noexcept(false) { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// Calls something, and turns what it throws into a Python error. Whether it threw nothing.
template <typename Call>
bool without_exceptions(Call&& call) {
  try {
    call();
    return true;
  } catch (const abi::__forced_unwind&) {
    throw;  // the interpreter ends this thread
  } catch (...) {
    raise_in_python();
    return false;
  }
}

}  // namespace offload
