#include "gauge_type.h"

#include <structmember.h>

namespace offload {
namespace {

struct GaugeObject {
  PyObject_HEAD
  Gauge gauge;
};

// A share adds its count to a gauge while it exists. Freeing it subtracts the count, so an interrupt cannot leave the
// gauge too high.
struct ShareObject {
  PyObject_HEAD
  PyObject* gauge;  // null: closed
  int64_t count;
};

PyTypeObject* gauge_type = nullptr;
PyTypeObject* share_type = nullptr;

Gauge& value_of(PyObject* self) { return reinterpret_cast<GaugeObject*>(self)->gauge; }

PyObject* gauge_add(PyObject* self, PyObject* more) {
  const long long count = PyLong_AsLongLong(more);
  if (count == -1 && PyErr_Occurred()) return nullptr;
  value_of(self).add(count);
  Py_RETURN_NONE;
}

PyObject* gauge_share(PyObject* self, PyObject* more) {
  const long long count = PyLong_AsLongLong(more);
  if (count == -1 && PyErr_Occurred()) return nullptr;
  PyObject* const made = share_type->tp_alloc(share_type, 0);
  if (made == nullptr) return nullptr;
  auto* const share = reinterpret_cast<ShareObject*>(made);
  share->gauge = shared(self).release();
  share->count = count;
  value_of(self).add(count);
  return made;
}

void end_share(PyObject* self) {
  auto* const share = reinterpret_cast<ShareObject*>(self);
  const Owned gauge(std::exchange(share->gauge, nullptr));
  if (gauge) value_of(gauge.get()).add(-share->count);
}

PyObject* share_close(PyObject* self, PyObject*) {
  end_share(self);
  Py_RETURN_NONE;
}

void share_dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  end_share(self);
  type->tp_free(self);
  Py_DECREF(type);
}

void gauge_dealloc(PyObject* self) {
  PyTypeObject* const type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

constexpr Py_ssize_t kGauge = offsetof(GaugeObject, gauge);
PyMemberDef gauge_members[] = {{"now", T_LONGLONG, kGauge + static_cast<Py_ssize_t>(offsetof(Gauge, now)), 0, nullptr},
                               {"peak", T_LONGLONG, kGauge + static_cast<Py_ssize_t>(offsetof(Gauge, peak)), READONLY,
                                nullptr},
                               {nullptr, 0, 0, 0, nullptr}};
PyMethodDef gauge_methods[] = {
    {"add", gauge_add, METH_O, "add(more): add a number, which may be negative."},
    {"share", gauge_share, METH_O, "share(more): add a number until the result is closed or freed."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef share_methods[] = {
    {"close", share_close, METH_NOARGS, "close(): subtract the share's number; a second call does nothing."},
    {nullptr, nullptr, 0, nullptr}};

bool add_share_type(PyObject* module) {
  static PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>("A number that a gauge includes while this exists.")},
                                {Py_tp_methods, share_methods},
                                {Py_tp_dealloc, slot(share_dealloc)},
                                {0, nullptr}};
  static PyType_Spec spec = {"offload._core.GaugeShare", sizeof(ShareObject), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
  share_type = add_type(module, "GaugeShare", spec);
  return share_type != nullptr;
}

}  // namespace

bool add_gauge_type(PyObject* module) {
  static PyType_Slot slots[] = {{Py_tp_doc, const_cast<char*>("A number and its maximum so far.")},
                                {Py_tp_members, gauge_members},
                                {Py_tp_methods, gauge_methods},
                                {Py_tp_new, slot(PyType_GenericNew)},
                                {Py_tp_dealloc, slot(gauge_dealloc)},
                                {0, nullptr}};
  static PyType_Spec spec = {"offload._core.Gauge", sizeof(GaugeObject), 0, Py_TPFLAGS_DEFAULT, slots};
  gauge_type = add_type(module, "Gauge", spec);
  return gauge_type != nullptr && add_share_type(module);
}

std::shared_ptr<Gauge> gauge_of(PyObject* object) {
  if (Py_TYPE(object) != gauge_type) {
    PyErr_SetString(PyExc_TypeError, "expected a Gauge");
    return nullptr;
  }
  Py_INCREF(object);
  return {&value_of(object), [object](Gauge*) { Py_DECREF(object); }};
}

}  // namespace offload
