#include "saved_identity.h"

#include "mutants.h"

namespace offload {
namespace {

// Returns the tensor whose version counter `tensor` shares: a new reference, or null.
PyObject* owner_of(PyObject* tensor) {
  PyObject* const base = get(tensors.base, tensor);
  if (base != Py_None) return base;  // null if there is a Python error
  Py_DECREF(base);
  Py_INCREF(tensor);
  return tensor;
}

PyObject* storage_of(PyObject* tensor) { return PyObject_CallOneArg(tensors.untyped_storage, tensor); }

int64_t bytes_of(PyObject* storage) {
  return to_int(PyObject_CallOneArg(tensors.storage_nbytes, storage));
}

// Returns whether the owner covers its whole storage; -1: a Python error.
int owns_all(PyObject* tensor, PyObject* owner, int64_t nbytes, int64_t storage_nbytes) {
  if (owner == tensor) return nbytes >= storage_nbytes;
  const int64_t owner_nbytes = to_int(get(tensors.nbytes, owner));
  const Owned owned(owner_nbytes < 0 ? nullptr : storage_of(owner));
  if (!owned) return -1;
  const int64_t owned_nbytes = bytes_of(owned.get());
  return owned_nbytes < 0 ? -1 : owner_nbytes >= owned_nbytes;
}

// Reads owner, version and storage of the key. Returns false if there is a Python error.
bool read_identities(PyObject* tensor, SavedIdentity* found) {
  SavedKey* const key = &found->key;
  PyObject *const owner = found->owner.get(), *const storage = found->storage.get();
  key->owner = to_int(get(tensors.identity, owner));
  found->version = to_int(get(tensors.version, tensor));
  key->version = OFFLOAD_BROKEN("a version is part of an identity") ? 0 : found->version;
  key->storage = to_int(get(tensors.storage_identity, storage));
  return !PyErr_Occurred();
}

}  // namespace

PyObject* version_owner(PyObject* tensor) { return owner_of(tensor); }

bool add_identity_functions(PyObject* module) {
  static PyMethodDef functions[] = {
      {"version_owner", [](PyObject*, PyObject* tensor) { return owner_of(tensor); }, METH_O,
       "version_owner(tensor): return the tensor whose version counter `tensor` shares."},
      {nullptr, nullptr, 0, nullptr}};
  return PyModule_AddFunctions(module, functions) == 0;
}

bool identify(PyObject* tensor, SavedIdentity* found) {
  if (!found->owner) found->owner = Owned(owner_of(tensor));
  if (found->owner && !found->storage) found->storage = Owned(storage_of(tensor));
  return found->owner && found->storage;
}

int find_key(PyObject* tensor, int64_t nbytes, SavedIdentity* found) {
  if (!identify(tensor, found)) return -1;
  SavedKey& key = found->key;
  key.begin = 0;
  key.nbytes = bytes_of(found->storage.get());
  const int whole = key.nbytes < 0 ? -1 : owns_all(tensor, found->owner.get(), nbytes, key.nbytes);
  if (whole <= 0) return whole;
  return read_identities(tensor, found) ? 1 : -1;
}

}  // namespace offload
