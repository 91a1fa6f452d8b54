// The attributes and methods of tensors that C++ uses. Python looks them up, so the extension needs no torch headers.
//
// Callers hold the GIL. A function that fails sets a Python error.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <utility>

namespace offload {

// An owned reference, or null.
class Owned {
 public:
  Owned() = default;
  explicit Owned(PyObject* object) : object_(object) {}
  Owned(Owned&& other) noexcept : object_(other.release()) {}
  Owned& operator=(Owned&& other) noexcept {
    const Owned before(std::exchange(object_, other.release()));  // freed at the end: this may run Python code
    return *this;
  }
  ~Owned() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* share() const {
    Py_XINCREF(object_);
    return object_;
  }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// Attributes and methods of torch's classes. They are looked up once, so a call needs no search. The references are
// never released.
struct TensorInterface {
  PyObject* tensor_type = nullptr;
  PyObject* parameter_type = nullptr;
  PyObject* out_of_memory = nullptr;  // exception types
  PyObject* strided = nullptr;  // the layout of tensors that can be swapped
  // Descriptors.
  PyObject* layout = nullptr;
  PyObject* is_nested = nullptr;
  PyObject* nbytes = nullptr;
  PyObject* base = nullptr;
  PyObject* version = nullptr;
  PyObject* is_leaf = nullptr;
  PyObject* data = nullptr;
  PyObject* device = nullptr;
  PyObject* gradient = nullptr;
  PyObject* requires_grad = nullptr;
  PyObject* dtype = nullptr;
  PyObject* itemsize = nullptr;
  PyObject* shape = nullptr;
  PyObject* identity = nullptr;
  PyObject* storage_identity = nullptr;  // a descriptor of the storage's class
  // Callables that take the tensor.
  PyObject* is_view = nullptr;
  PyObject* detach = nullptr;
  PyObject* untyped_storage = nullptr;
  PyObject* stride = nullptr;
  PyObject* storage_offset = nullptr;
  PyObject* is_conj = nullptr;
  PyObject* is_neg = nullptr;
  PyObject* is_inference = nullptr;
  PyObject* conjugated = nullptr;
  PyObject* negated = nullptr;
  PyObject* type_name = nullptr;
  PyObject* set_storage = nullptr;     // takes a tensor, a storage, an offset, a shape and a stride
  // Callables that take other arguments.
  PyObject* storage_nbytes = nullptr;    // takes a storage
  PyObject* storage_address = nullptr;   // takes a storage
  PyObject* storage_holders = nullptr;   // takes a storage's identity; null if torch does not have this function
  PyObject* storage_of_buffer = nullptr;
  PyObject* watch_storage = nullptr;    // takes a storage; returns a weak reference, to be freed with unwatch_storage
  PyObject* storage_is_gone = nullptr;  // takes such a reference
  PyObject* unwatch_storage = nullptr;  // takes such a reference
  PyObject* watched_storage = nullptr;  // takes such a reference; returns the storage, or None
  PyObject* empty = nullptr;            // takes a dtype and a device
  PyObject* raise_changed = nullptr;    // takes a saved tensor's type name, shape, version and expected version
  int64_t holders_alone = 0;           // the value of `storage_holders` if only one tensor holds the storage
};

inline TensorInterface tensors;

// Returns whether set_tensor_interface was called. False: a Python error.
inline bool has_tensor_interface() {
  if (tensors.tensor_type != nullptr) return true;
  PyErr_SetString(PyExc_RuntimeError, "set_tensor_interface was not called");
  return false;
}

inline Owned shared(PyObject* object) {
  Py_XINCREF(object);
  return Owned(object);
}

// Returns the object of a weak reference; null if it was freed.
inline Owned referent(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030d0000
  PyObject* found = nullptr;
  PyWeakref_GetRef(reference, &found);  // fails only for an object that is not a weak reference
  return Owned(found);
#else
  PyObject* const found = PyWeakref_GetObject(reference);
  return found == Py_None ? Owned() : shared(found);
#endif
}

// Returns the value of a descriptor of the object's class: a new reference, or null.
inline PyObject* get(PyObject* descriptor, PyObject* object) {
  return Py_TYPE(descriptor)->tp_descr_get(descriptor, object, reinterpret_cast<PyObject*>(Py_TYPE(object)));
}

// Both functions consume the reference. They return −1 if there is a Python error.
inline int is_true(PyObject* owned) {
  const Owned result(owned);
  return result ? PyObject_IsTrue(result.get()) : -1;
}

inline int64_t to_int(PyObject* owned) {
  const Owned result(owned);
  return result ? PyLong_AsLongLong(result.get()) : -1;
}

template <typename Function>
void* slot(Function* function) {
  return reinterpret_cast<void*>(function);
}

// Creates a type and adds it to the module. Returns a reference that is never released, or null.
inline PyTypeObject* add_type(PyObject* module, const char* name, PyType_Spec& spec) {
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) return nullptr;
  Py_INCREF(type);  // for the caller
  if (PyModule_AddObject(module, name, type) < 0) {
    Py_DECREF(type);
    return nullptr;
  }
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace offload
