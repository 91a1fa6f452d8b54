// What a graph node holds in the place of a tensor that stays, and what C++ asks of a tensor: attributes of its Python
// class, so that the extension needs no headers of torch.
//
// Callers hold the GIL. A function that fails leaves a Python error.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <cstdint>
#include <utility>

namespace offload {

// An owned reference, or null.
class Owned {
 public:
  explicit Owned(PyObject* object = nullptr) : object_(object) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  ~Owned() { Py_XDECREF(object_); }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_;
};

// What is asked of a tensor, as attributes of its class: found once, and called without a search. References are kept
// for good.
struct TensorInterface {
  PyObject* tensor_type = nullptr;
  PyObject* parameter_type = nullptr;
  PyObject* strided = nullptr;  // the layout of tensors that can move
  // Descriptors.
  PyObject* layout = nullptr;
  PyObject* is_nested = nullptr;
  PyObject* nbytes = nullptr;
  PyObject* base = nullptr;
  PyObject* version = nullptr;
  PyObject* is_leaf = nullptr;
  PyObject* identity = nullptr;
  PyObject* storage_identity = nullptr;  // of a storage's class
  // Callables that take the tensor.
  PyObject* is_view = nullptr;
  PyObject* detach = nullptr;
  PyObject* untyped_storage = nullptr;
  PyObject* storage_nbytes = nullptr;  // takes a storage
};

inline TensorInterface tensors;

// The value of a descriptor of the object's class: a new reference, or null.
inline PyObject* get(PyObject* descriptor, PyObject* object) {
  return Py_TYPE(descriptor)->tp_descr_get(descriptor, object, reinterpret_cast<PyObject*>(Py_TYPE(object)));
}

// −1: a Python error. Both take over the reference that they are given.
inline int is_true(PyObject* owned) {
  const Owned result(owned);
  return result ? PyObject_IsTrue(result.get()) : -1;
}

inline int64_t to_int(PyObject* owned) {
  const Owned result(owned);
  return result ? PyLong_AsLongLong(result.get()) : -1;
}

// Takes part in garbage collection; runs no Python code when it dies.
struct KeptTensor {
  PyObject_HEAD
  PyObject* tensor;    // without its history
  PyObject* version;   // at its pack
  Py_ssize_t index;    // of its pack, where its unpack is to be told; else -1
};

extern PyTypeObject* kept_type;

// Makes the type. Returns false and leaves a Python error where it cannot.
bool add_kept_type(PyObject* module);
// A record of `tensor`, which has no history; null, and a Python error, without memory.
PyObject* make_kept(Owned& tensor, Owned& version, Py_ssize_t index);

template <typename Function>
void* slot(Function* function) {
  return reinterpret_cast<void*>(function);
}

// The type that a specification describes, as a name of the module: a reference for good, or null.
inline PyTypeObject* add_type(PyObject* module, const char* name, PyType_Spec& spec) {
  PyObject* const type = PyType_FromSpec(&spec);
  if (type == nullptr) return nullptr;
  Py_INCREF(type);  // one for the caller, for good
  if (PyModule_AddObject(module, name, type) < 0) {
    Py_DECREF(type);
    return nullptr;
  }
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace offload
