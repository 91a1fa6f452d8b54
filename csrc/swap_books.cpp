#include "swap_books.h"

#include <algorithm>

#include "mutants.h"
#include "python_errors.h"
#include "swapped_storage.h"

namespace offload {
namespace {

// Removes an entry. Returns false if it has already been removed.
bool take_out(std::deque<CopyOutRef>& queue, const CopyOutRef& entry) {
  const auto found = std::find(queue.begin(), queue.end(), entry);
  if (found == queue.end()) return false;
  queue.erase(found);
  return true;
}

bool tell_failure(Books& books, const Ticket& ticket) {
  books.failure = ticket.failure_text();
  books.failed_bytes += static_cast<int64_t>(ticket.bytes());
  if (++books.failed > 1) return true;
  const Owned text(PyUnicode_DecodeUTF8(books.failure.data(), static_cast<Py_ssize_t>(books.failure.size()), "replace"));
  const Owned format(PyUnicode_FromString("a tensor stays on the device, and others may: %s"));
  if (!text || !format) return false;
  return Owned(PyObject_CallFunctionObjArgs(books.warn.get(), format.get(), text.get(), nullptr)).get() != nullptr;
}

// Releases the source of a copy-out that has ended.
bool release_source(Books& books, const CopyOutRef& copy_out) {
  if (!take_out(books.copies_out, copy_out)) return true;  // another thread has released it
  books.in_flight_bytes -= copy_out->nbytes;
  const State state = copy_out->ticket->state();
  const Owned saved = shared(std::exchange(copy_out->saved, nullptr));
  // If the copy failed or was cancelled, the source is kept, as if it had not been swapped.
  if (saved && state != State::failed && state != State::cancelled && !copied_out(saved.get())) return false;
  if (!saved) copy_out->source = Owned();
  return state != State::failed || tell_failure(books, *copy_out->ticket);
}

}  // namespace

Books::~Books() {
  // Keeps the GIL, because a destructor cannot throw what taking it again may throw while the interpreter shuts down.
  // No lane takes the GIL. An error means that there is nothing to wait for, as in a forked child, which has no lanes.
  const auto wait = [](auto&& until_it_ends) {
    try {
      until_it_ends();
    } catch (const std::exception&) {
    }
  };
  if (!OFFLOAD_BROKEN("freed engines wait for copy-outs"))
    for (const CopyOutRef& each : copies_out)
      wait([&] {
        if (!each->ticket->cancel()) each->ticket->wait_out(each->stream);
      });
  if (!OFFLOAD_BROKEN("freed engines wait for copy-ins"))
    for (const auto& [ticket, target] : retired) wait([&ticket = ticket] { ticket->settle(); });
}

bool current_stream(const Books& books, Stream* stream) {
  *stream = nullptr;
  if (!books.current_stream || OFFLOAD_BROKEN("the current stream orders")) return true;
  const Owned handle(PyObject_CallNoArgs(books.current_stream.get()));
  if (!handle) return false;
  *stream = PyLong_AsVoidPtr(handle.get());
  return *stream != nullptr || !PyErr_Occurred();
}

PyObject* empty_of(Books& books, PyObject* dtype) {
  const auto known = books.empties.find(dtype);
  if (known != books.empties.end()) return known->second.get();
  Owned made(PyObject_CallFunctionObjArgs(tensors.empty, dtype, books.device.get(), nullptr));
  if (!made) return nullptr;
  PyObject* const result = made.get();
  books.empties.emplace(dtype, std::move(made));
  return result;
}

bool collect(Books& books) {
  for (;;) {
    if (books.copies_out.empty()) break;
    const CopyOutRef oldest = books.copies_out.front();
    if (!oldest->ticket->out_done()) break;
    if (!release_source(books, oldest)) return false;
  }
  while (!books.retired.empty() && books.retired.front().first->in_done()) {
    const auto gone = std::move(books.retired.front());
    books.retired.pop_front();
  }
  return true;
}

bool limit_in_flight(Books& books) {
  while (books.copies_out.size() > 1 && books.in_flight_bytes > books.in_flight_bytes_max) {
    const CopyOutRef oldest = books.copies_out.front();
    if (!finish_copy_out(books, oldest)) return false;
  }
  return true;
}

bool finish_copy_out(Books& books, const CopyOutRef& copy_out) {
  const std::shared_ptr<Ticket> ticket = copy_out->ticket;
  if (!ticket->out_done()) {
    const GilRelease release;
    ticket->wait_out(copy_out->stream);
  }
  return release_source(books, copy_out);
}

bool drain(Books& books) {
  while (!books.copies_out.empty()) {
    const CopyOutRef oldest = books.copies_out.front();
    if (!finish_copy_out(books, oldest)) return false;
  }
  while (!books.retired.empty()) {
    const std::shared_ptr<Ticket> ticket = books.retired.front().first;
    {
      const GilRelease release;
      ticket->settle();
    }
    const auto found = std::find_if(books.retired.begin(), books.retired.end(),
                                    [&ticket](const auto& entry) { return entry.first == ticket; });
    if (found == books.retired.end()) continue;
    const auto gone = std::move(*found);
    books.retired.erase(found);
  }
  return true;
}

void retire(Books& books, const std::shared_ptr<Ticket>& ticket, Target& target) {
  if (OFFLOAD_BROKEN("abandoned targets are kept")) return;
  if (books.new_storage || books.alignment_bytes == 1)
    books.retired.emplace_back(ticket, Target{target.block, shared(target.storage.get())});
}

}  // namespace offload
