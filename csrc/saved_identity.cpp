#include "saved_identity.h"

#include "mutants.h"

namespace offload {
namespace {

// The tensor whose version counter this one shares: a new reference, or null.
PyObject* owner_of(PyObject* tensor) {
  PyObject* const base = get(tensors.base, tensor);
  if (base != Py_None) return base;
  Py_DECREF(base);
  Py_INCREF(tensor);
  return tensor;
}

PyObject* storage_of(PyObject* tensor) { return PyObject_CallFunctionObjArgs(tensors.untyped_storage, tensor, nullptr); }

int64_t bytes_of(PyObject* storage) {
  return to_int(PyObject_CallFunctionObjArgs(tensors.storage_nbytes, storage, nullptr));
}

// 1: the owner shows all of its storage. 0: only a part of it. -1: a Python error.
int owns_all(PyObject* tensor, PyObject* owner, int64_t nbytes, int64_t storage_nbytes) {
  if (owner == tensor) return nbytes >= storage_nbytes;
  const int64_t owner_nbytes = to_int(get(tensors.nbytes, owner));
  const Owned owned(owner_nbytes < 0 ? nullptr : storage_of(owner));
  if (!owned) return -1;
  const int64_t owned_nbytes = bytes_of(owned.get());
  return owned_nbytes < 0 ? -1 : owner_nbytes >= owned_nbytes;
}

PyObject* key_of(PyObject* tensor, PyObject* owner, PyObject* storage, int64_t storage_nbytes) {
  const bool by_address = OFFLOAD_BROKEN("identity is more than an address");
  const bool by_storage = OFFLOAD_BROKEN("a version is part of an identity");
  const Owned identity(by_address ? PyLong_FromLong(0) : get(tensors.identity, owner));
  const Owned version(by_address || by_storage ? PyLong_FromLong(0) : get(tensors.version, tensor));
  const Owned begin(PyLong_FromLong(0));
  const Owned size(PyLong_FromLongLong(storage_nbytes));
  const Owned where(by_address ? PyObject_CallMethod(storage, "data_ptr", nullptr)
                               : get(tensors.storage_identity, storage));
  if (!identity || !version || !begin || !size || !where) return nullptr;
  return PyTuple_Pack(5, identity.get(), version.get(), begin.get(), size.get(), where.get());
}

// The handle that a live copy has by this key: a new reference, None where there is none, or null.
PyObject* handle_of(PyObject* live, PyObject* key) {
  PyObject* const known = PyDict_GetItemWithError(live, key);  // borrowed: nothing runs until it is called
  if (known != nullptr) return PyObject_CallFunctionObjArgs(known, nullptr);
  if (PyErr_Occurred()) return nullptr;
  Py_RETURN_NONE;
}

PyObject* find_saved(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 3 || !PyDict_Check(args[2])) {
    PyErr_SetString(PyExc_TypeError, "find_saved takes a tensor, its bytes and a dict of live copies");
    return nullptr;
  }
  PyObject* const tensor = args[0];
  const int64_t nbytes = PyLong_AsLongLong(args[1]);
  if (nbytes < 0 && PyErr_Occurred()) return nullptr;
  const Owned storage(storage_of(tensor));
  const Owned owner(storage ? owner_of(tensor) : nullptr);
  if (!owner) return nullptr;
  const int64_t storage_nbytes = bytes_of(storage.get());
  const int whole = storage_nbytes < 0 ? -1 : owns_all(tensor, owner.get(), nbytes, storage_nbytes);
  if (whole < 0) return nullptr;
  if (!whole) Py_RETURN_NONE;
  const Owned key(key_of(tensor, owner.get(), storage.get(), storage_nbytes));
  const Owned handle(key ? handle_of(args[2], key.get()) : nullptr);
  return handle ? PyTuple_Pack(2, key.get(), handle.get()) : nullptr;
}

PyObject* version_owner(PyObject*, PyObject* tensor) { return owner_of(tensor); }

PyMethodDef functions[] = {
    {"find_saved", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(find_saved)), METH_FASTCALL,
     "find_saved(tensor, nbytes, live): (key, handle or None), or None."},
    {"version_owner", version_owner, METH_O, "version_owner(tensor): whose version counter it shares."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool add_identity_functions(PyObject* module) { return PyModule_AddFunctions(module, functions) == 0; }

}  // namespace offload
