// Every operator that has no kernel of its own: its results' shapes are told at once, by its meta kernel, and computed
// later, by its CPU kernel, on the thread of the stream that is current.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace sim {

using torch::jit::Stack;

// Computes on CPU tensors what the CPU has no operator of that name for: arguments in, results out.
using Kernel = void (*)(Stack& stack);

// Queues an operator whose arguments are on the stack, and replaces them by its results; waits only where the host has
// to know a value.
void compute(const c10::OperatorHandle& op, Stack* stack, Kernel kernel = nullptr);

inline c10::OperatorHandle find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

// An operator of which a backend has to bring a kernel, and the CPU has it by `kernel`.
template <Kernel kernel>
void with_kernel(const c10::OperatorHandle& op, Stack* stack) {
  compute(op, stack, kernel);
}
void fallback(const c10::OperatorHandle& op, Stack* stack);

}  // namespace sim
