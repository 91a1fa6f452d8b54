#include "kept_tensor.h"

#include <structmember.h>

namespace offload {

PyTypeObject* kept_type = nullptr;

namespace {

void kept_dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  auto* kept = reinterpret_cast<KeptTensor*>(self);
  Py_CLEAR(kept->tensor);
  Py_CLEAR(kept->version);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMemberDef kept_members[] = {{"tensor", T_OBJECT_EX, offsetof(KeptTensor, tensor), READONLY, nullptr},
                              {"version", T_OBJECT_EX, offsetof(KeptTensor, version), READONLY, nullptr},
                              {"index", T_PYSSIZET, offsetof(KeptTensor, index), READONLY, nullptr},
                              {nullptr, 0, 0, 0, nullptr}};

}  // namespace

bool add_kept_type(PyObject* module) {
  static PyType_Slot kept_slots[] = {{Py_tp_doc, const_cast<char*>("A saved tensor that is kept.")},
                                     {Py_tp_members, kept_members},
                                     {Py_tp_dealloc, slot(kept_dealloc)},
                                     {0, nullptr}};
  static PyType_Spec kept_spec = {"offload._core.KeptTensor", sizeof(KeptTensor), 0, Py_TPFLAGS_DEFAULT, kept_slots};
  kept_type = add_type(module, "KeptTensor", kept_spec);
  return kept_type != nullptr;
}

PyObject* make_kept(Owned& tensor, Owned& version, Py_ssize_t index) {
  auto* kept = reinterpret_cast<KeptTensor*>(kept_type->tp_alloc(kept_type, 0));
  if (kept == nullptr) return nullptr;
  kept->tensor = tensor.release();
  kept->version = version.release();
  kept->index = index;
  return reinterpret_cast<PyObject*>(kept);
}

}  // namespace offload
