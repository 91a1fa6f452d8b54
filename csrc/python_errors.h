// Conversion of C++ exceptions to Python errors, and release of the GIL. For functions that parse no arguments.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cxxabi.h>

namespace offload {

// Converts the C++ exception that is being handled to a Python error. Defined in bindings.cpp.
void raise_in_python() noexcept;

// Releases the GIL. If the interpreter shuts down meanwhile, it ends the thread in the destructor by unwinding its
// stack. So the destructor must not be noexcept, or the process would abort.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;
  ~GilRelease() noexcept(false) { PyEval_RestoreThread(state_); }

 private:
  PyThreadState* state_;
};

// Calls a function; releases the GIL meanwhile if the function may wait.
template <typename Call>
void call_without_gil(bool may_wait, Call&& call) {
  if (!may_wait) return call();
  const GilRelease release;
  call();
}

// Calls a function and converts its exceptions to Python errors. Returns whether it threw none.
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
