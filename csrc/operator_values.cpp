#include "operator_values.h"

#include <structmember.h>

namespace offload {
namespace {

PyTypeObject* watch_type = nullptr;
PyTypeObject* value_type = nullptr;

// -- StorageWatch -----------------------------------------------------------------------------------------------------

struct StorageWatch {
  PyObject_HEAD
  PyObject* reference;  // torch's weak reference, which must be freed with unwatch_storage; null: closed
};

PyObject*& reference_of(PyObject* self) { return reinterpret_cast<StorageWatch*>(self)->reference; }

bool close(PyObject* self) {
  const Owned reference(std::exchange(reference_of(self), nullptr));
  return !reference || Owned(PyObject_CallOneArg(tensors.unwatch_storage, reference.get()));
}

int is_gone(PyObject* self) {
  PyObject* const reference = reference_of(self);
  return reference == nullptr ? 1 : is_true(PyObject_CallOneArg(tensors.storage_is_gone, reference));
}

PyObject* watch_new(PyTypeObject*, PyObject* given, PyObject*) {
  PyObject* storage;
  return PyArg_ParseTuple(given, "O", &storage) && has_tensor_interface() ? make_watch(storage) : nullptr;
}

// Runs only C code: an exception that a signal handler raises here would be lost.
void watch_dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  PyObject *error, *value, *traceback;
  PyErr_Fetch(&error, &value, &traceback);
  if (!close(self)) PyErr_Clear();
  PyErr_Restore(error, value, traceback);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* watch_is_alive(PyObject* self, void*) {
  const int gone = is_gone(self);
  return gone < 0 ? nullptr : PyBool_FromLong(!gone);
}

PyObject* watch_expired(PyObject* self, PyObject*) {
  const int gone = is_gone(self);
  return gone < 0 || (gone > 0 && !close(self)) ? nullptr : PyBool_FromLong(gone);
}

PyObject* watch_storage(PyObject* self, PyObject*) {
  if (reference_of(self) == nullptr) Py_RETURN_NONE;
  const Owned reference = shared(reference_of(self));
  return PyObject_CallOneArg(tensors.watched_storage, reference.get());
}

PyObject* watch_close(PyObject* self, PyObject*) {
  if (!close(self)) return nullptr;
  Py_RETURN_NONE;
}

// -- Value ------------------------------------------------------------------------------------------------------------

Value* value_of(PyObject* self) { return reinterpret_cast<Value*>(self); }

PyObject* new_value(int64_t nbytes, int64_t version, PyObject* watch, PyObject* call, PyObject* place) {
  PyObject* const self = value_type->tp_alloc(value_type, 0);
  if (self == nullptr) return nullptr;
  Value* const value = value_of(self);
  value->call = shared(call).release();
  value->place = shared(place).release();
  value->watch = shared(watch).release();
  value->slot = shared(Py_None).release();
  value->probe = shared(Py_None).release();
  value->held = shared(Py_None).release();
  value->index = -1;
  value->nbytes = nbytes;
  value->version = version;
  return self;
}

PyObject* zero() {
  static PyObject* const number = PyLong_FromLong(0);
  return number;
}

PyObject* value_new(PyTypeObject*, PyObject* given, PyObject*) {
  long long nbytes, version;
  PyObject *watch = Py_None, *call = Py_None, *place = zero();
  if (!PyArg_ParseTuple(given, "LL|OOO", &nbytes, &version, &watch, &call, &place)) return nullptr;
  return new_value(nbytes, version, watch, call, place);
}

int value_traverse(PyObject* self, visitproc visit, void* arg) {
  Value* const value = value_of(self);
  for (PyObject* each : {value->call, value->place, value->watch, value->slot, value->probe, value->held})
    Py_VISIT(each);
  Py_VISIT(Py_TYPE(self));
  return 0;
}

int value_clear(PyObject* self) {
  Value* const value = value_of(self);
  for (PyObject** each : {&value->call, &value->place, &value->watch, &value->slot, &value->probe, &value->held})
    Py_CLEAR(*each);
  return 0;
}

void value_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  PyTypeObject* const type = Py_TYPE(self);
  value_clear(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef value_members[] = {{"call", T_OBJECT, offsetof(Value, call), READONLY, nullptr},
                               {"place", T_OBJECT, offsetof(Value, place), READONLY, nullptr},
                               {"watch", T_OBJECT, offsetof(Value, watch), READONLY, nullptr},
                               {"slot", T_OBJECT, offsetof(Value, slot), 0, nullptr},
                               {"probe", T_OBJECT, offsetof(Value, probe), 0, nullptr},
                               {"held", T_OBJECT, offsetof(Value, held), 0, nullptr},
                               {"index", T_PYSSIZET, offsetof(Value, index), 0, nullptr},
                               {"nbytes", T_LONGLONG, offsetof(Value, nbytes), READONLY, nullptr},
                               {"version", T_LONGLONG, offsetof(Value, version), READONLY, nullptr},
                               {nullptr, 0, 0, 0, nullptr}};

bool add_watch_type(PyObject* module) {
  static PyGetSetDef getters[] = {
      {"is_alive", watch_is_alive, nullptr, "Whether other code still holds the storage.", nullptr},
      {nullptr, nullptr, nullptr, nullptr, nullptr}};
  static PyMethodDef methods[] = {
      {"storage", watch_storage, METH_NOARGS, "storage(): the storage; None if it has been freed."},
      {"expired", watch_expired, METH_NOARGS, "expired(): whether the storage has been freed."},
      {"close", watch_close, METH_NOARGS, "close(): stop watching; the storage's address may be reused."},
      {nullptr, nullptr, 0, nullptr}};
  static PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>("A weak reference to a storage.")},
                                {Py_tp_getset, getters},
                                {Py_tp_methods, methods},
                                {Py_tp_new, slot(watch_new)},
                                {Py_tp_dealloc, slot(watch_dealloc)},
                                {0, nullptr}};
  static PyType_Spec spec = {"offload._core.StorageWatch", sizeof(StorageWatch), 0, Py_TPFLAGS_DEFAULT, slots};
  watch_type = add_type(module, "StorageWatch", spec);
  return watch_type != nullptr;
}

}  // namespace

PyObject* make_watch(PyObject* storage) {
  Owned reference(PyObject_CallOneArg(tensors.watch_storage, storage));
  if (!reference) return nullptr;
  PyObject* const self = watch_type->tp_alloc(watch_type, 0);
  if (self != nullptr) {
    reference_of(self) = reference.release();
  } else {
    const Owned closed(PyObject_CallOneArg(tensors.unwatch_storage, reference.get()));
  }
  return self;
}

PyObject* make_value(int64_t version, PyObject* watch) { return new_value(0, version, watch, Py_None, zero()); }

Value* as_value(PyObject* object) { return Py_TYPE(object) == value_type ? value_of(object) : nullptr; }

bool add_value_types(PyObject* module) {
  static PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>("One version of one storage.")},
                                {Py_tp_members, value_members},
                                {Py_tp_new, slot(value_new)},
                                {Py_tp_traverse, slot(value_traverse)},
                                {Py_tp_clear, slot(value_clear)},
                                {Py_tp_dealloc, slot(value_dealloc)},
                                {0, nullptr}};
  static PyType_Spec spec = {"offload._core.Value", sizeof(Value), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, slots};
  value_type = add_type(module, "Value", spec);
  return value_type != nullptr && add_watch_type(module);
}

}  // namespace offload
