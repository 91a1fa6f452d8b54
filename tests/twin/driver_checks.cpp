// Checks cuda_driver.cpp over the test double. One check a process: driver_checks CHECK FAKE WITHOUT_QUERY
// WITHOUT_OPTIONAL, where the last three are libraries: the double, and two copies of it that lack entry points. No
// argument: lists them.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "driver_bench.h"

namespace checks {

// driver_order_checks.cpp
void registration_is_chunked();
void registration_is_rolled_back();
void copies_cross_chunks();
void events_order_streams();
void waits_keep_their_record();

}  // namespace checks

// The double's own entry points, for playing the framework beside the driver.
extern "C" {
offload::cuda::Result cuDevicePrimaryCtxRetain(offload::cuda::ContextHandle* context, int device);
offload::cuda::Result cuCtxPushCurrent_v2(offload::cuda::ContextHandle context);
offload::cuda::Result cuCtxPopCurrent_v2(offload::cuda::ContextHandle* context);
offload::cuda::Result cuStreamCreate(offload::cuda::StreamHandle* stream, unsigned flags);
offload::cuda::Result cuStreamDestroy_v2(offload::cuda::StreamHandle stream);
offload::cuda::Result cuMemHostRegister_v2(void* host, size_t bytes, unsigned flags);
offload::cuda::Result cuMemHostUnregister(void* host);
offload::cuda::Result cuMemcpyDtoHAsync_v2(void* host, unsigned long long device, size_t bytes,
                                           offload::cuda::StreamHandle stream);
}

namespace {

using namespace checks;

void context_is_restored() {
  Bench bench;
  offload::cuda::ContextHandle foreign = nullptr;
  require(cuDevicePrimaryCtxRetain(&foreign, 1) == 0, "device 1 has a context");
  for (auto& [name, method] : bench.methods()) {
    method();
    require(sim_current_context() == nullptr, "no context is left after " + name);
    cuCtxPushCurrent_v2(foreign);
    method();
    require(sim_current_context() == foreign, "the framework's context is current after " + name);
    cuCtxPopCurrent_v2(&foreign);
  }
}

void context_is_retained_late() {
  require(offload::cuda_device_count(library) == 2, "two devices");
  const auto driver = offload::make_cuda_driver(1, library);
  require_equal(driver->name(), "cuda", "the name");
  require(!driver->in_forked_child(), "a device of its own, in its own process");
  driver->require_same_process();
  require(sim_retained_contexts() == 0, "no context before the first call that needs one");
  sim_fail_at("cuDevicePrimaryCtxRetain", 1, kOutOfMemory);
  const auto error = driver_error([&] { driver->device_memory(); }, "a failing retain");
  require_equal(error.call, "cuDevicePrimaryCtxRetain", "the call");
  require(driver->device_memory().total_bytes == 8 * kGiB, "memory, at the second attempt");
  driver->device_memory();
  require(sim_retained_contexts() == 1, "one context, retained once");
}

void every_error_is_typed() {
  Bench bench;
  for (auto& [name, method] : bench.methods()) {
    for (const std::string& failing : {name, std::string("cuCtxPushCurrent_v2")}) {
      sim_fail_at(failing.c_str(), 1, kOutOfMemory);
      const auto error = driver_error(method, name + ", failing in " + failing);
      require_equal(error.call, failing, "the call");
      require(error.code == kOutOfMemory, "the code is the driver's");
      require_text(error, failing + " failed with code 2: CUDA_ERROR_OUT_OF_MEMORY (out of memory)");
      require(sim_current_context() == nullptr, "no context is left after a failing " + name);
    }
    method();
  }
  sim_fail_at("cuEventQuery", 1, 719);
  const auto error = driver_error([&] { bench.driver->event_done(bench.to); }, "an unnamed error");
  require_text(error, "cuEventQuery failed with code 719: error without a name");
}

void destruction_never_throws() {
  auto bench = std::make_unique<Bench>();
  const auto driver = bench->driver;
  const int live_handles = sim_live_handles();
  for (const char* failing : {"cuStreamDestroy_v2", "cuEventDestroy_v2", "cuMemHostUnregister"}) {
    const Stream stream = driver->stream_create();
    const Event event = driver->event_create();
    sim_fail_at(failing, 1, kOutOfMemory);
    driver->stream_destroy(stream);
    driver->event_destroy(event);
    bench->register_other();
  }
  require(sim_live_handles() == live_handles + 2, "what failed to be destroyed is leaked, the rest is gone");
  sim_fail_at("cuCtxPushCurrent_v2", 1, kOutOfMemory);
  driver->event_destroy(bench->from);
  require(sim_live_handles() == live_handles + 2, "without a context nothing is destroyed");
  driver->stream_destroy(nullptr);
  driver->event_destroy(nullptr);
  driver->host_unregister(bench->device.data);
  require(sim_calls("cuMemHostUnregister") == 3, "memory that was never registered is left alone");
}

// Runs `action` in a forked child; true when it returns and the double saw no violation.
bool succeeds_in_child(const std::function<void()>& action) {
  const pid_t child = fork();
  if (child == 0) {
    try {
      action();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "in the child: %s\n", error.what());
      _exit(1);
    }
    if (sim_violations() > 0) std::fprintf(stderr, "in the child: %s\n", sim_first_violation());
    _exit(sim_violations() == 0 ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void fork_is_refused() {
  Bench bench;
  auto methods = bench.methods();
  methods["require_same_process"] = [&] { bench.driver->require_same_process(); };
  methods["make_cuda_driver"] = [&] { offload::make_cuda_driver(0, library); };
  const bool refused = succeeds_in_child([&] {
    for (auto& [name, method] : methods) {
      const auto error = driver_error(method, name);
      require_text(error, "use the spawn start method");
      require(error.code == offload::cuda::kNotInitialized, "the code is what libcuda says in a child");
    }
    require(bench.driver->in_forked_child(), "the child is told apart");
    require(offload::cuda_device_count(library) == 0, "no device in the child");
  });
  require(refused, "every call is refused in a forked child");
  const bool leaked = succeeds_in_child([&] {
    bench.driver->stream_destroy(bench.stream);
    bench.driver->event_destroy(bench.from);
    bench.driver->host_unregister(bench.host.data);
    require(sim_violations() == 0, "no call reached the library");
  });
  require(leaked, "destruction is silent in a forked child");
  require(bench.elapsed() >= 0, "the parent works on");
}

void default_stream_is_legacy() {
  Bench bench;
  bench.driver->event_record(bench.from, nullptr);
  bench.driver->stream_wait(nullptr, bench.from);
  bench.driver->stream_synchronize(nullptr);
  bench.driver->copy_out(bench.host.data, bench.device.data, kPageBytes, nullptr);
  bench.driver->stream_synchronize(nullptr);
  bench.driver->require_not_capturing(nullptr);
}

void capture_is_refused() {
  Bench bench;
  sim_set_capturing(static_cast<offload::cuda::StreamHandle>(bench.stream), 1);
  const auto error = driver_error([&] { bench.driver->require_not_capturing(bench.stream); }, "a capturing stream");
  require(error.code == offload::cuda::kCaptureUnsupported, "the code is CUDA's for such calls");
  require_text(error, "captured into a CUDA graph");
  sim_set_capturing(static_cast<offload::cuda::StreamHandle>(bench.stream), 0);
  bench.driver->require_not_capturing(bench.stream);
}

void missing_things_are_named() {
  const auto no_library = driver_error([] { offload::make_cuda_driver(0, "libnowhere.so"); }, "no library");
  require_text(no_library, "dlopen(libnowhere.so) failed with code 301");
  require_text(no_library, "install the NVIDIA driver");
  require(offload::cuda_device_count("libnowhere.so") == 0, "no library, no device");

  const auto no_entry = driver_error([] { offload::make_cuda_driver(0, library_without_query); }, "no cuEventQuery");
  require_text(no_entry, "cuEventQuery failed with code 302: missing in ");
  require(offload::cuda_device_count(library_without_query) == 0, "an unusable driver, no device");

  for (const int device : {-1, 2}) {
    const auto no_device = driver_error([&] { offload::make_cuda_driver(device, library); }, "no such device");
    require_text(no_device, "asked for device " + std::to_string(device) + ", 2 present");
  }
  sim_set_devices(0);
  const auto none = driver_error([] { offload::make_cuda_driver(0, library); }, "no device at all");
  require_equal(none.call, "cuInit", "the call");
  require(offload::cuda_device_count(library) == 0, "no device");
}

void optional_entries_may_be_missing() {
  const auto driver = offload::make_cuda_driver(0, library_without_optional);
  const Stream stream = driver->stream_create();
  const Event event = driver->event_create();
  driver->require_not_capturing(stream);
  driver->event_record(event, stream);
  driver->event_synchronize(event);
  const auto untimed = driver_error([&] { driver->event_elapsed_ms(event, event); }, "timing");
  require_text(untimed, "cuEventElapsedTime failed with code 302: this driver cannot time events");
  Pages pages(kPageBytes);
  driver->host_register(pages.data, kPageBytes);
  const auto nameless =
      driver_error([&] { driver->host_register(pages.data + kPageBytes / 2, kPageBytes); }, "an unaligned range");
  require_text(nameless, "error without a name");
  driver->host_unregister(pages.data);
  driver->event_destroy(event);
  driver->stream_destroy(stream);
}

void threads_share_a_driver() {
  const auto driver = offload::make_cuda_driver(0, library);
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&] {
      const Pages host(kPageBytes);
      const Pages device(kPageBytes);
      for (int round = 0; round < 50; ++round) {
        const Stream stream = driver->stream_create();
        const Event event = driver->event_create();
        driver->host_register(host.data, kPageBytes);
        driver->copy_in(device.data, host.data, kPageBytes, stream);
        driver->event_record(event, stream);
        while (!driver->event_done(event)) std::this_thread::yield();
        driver->host_unregister(host.data);
        driver->event_destroy(event);
        driver->stream_destroy(stream);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  require(sim_retained_contexts() == 1, "the context is retained once");
  require(sim_live_handles() == 0 && sim_registrations() == 0, "nothing is left");
}

// What a thread destroys as it ends may be the last to hold a store. This first takes what memory the thread has freed.
struct LastCaller {
  std::shared_ptr<Driver> driver;
  Stream stream;
  int* untouched;
  LastCaller() : driver(offload::make_cuda_driver(0, library)), stream(nullptr), untouched(nullptr) {}
  LastCaller(const LastCaller&) = delete;
  LastCaller& operator=(const LastCaller&) = delete;
  ~LastCaller() {
    std::array<std::array<char, 8>*, 8> taken;
    std::array<char, 8> pattern;
    pattern.fill('x');
    for (auto& each : taken) each = new std::array<char, 8>(pattern);
    driver->stream_destroy(stream);
    for (const auto* each : taken) {
      *untouched += *each == pattern ? 1 : 0;
      delete each;
    }
  }
};

void a_thread_that_ends_may_call() {
  int untouched = 0;
  std::thread([&] {
    thread_local LastCaller last;
    last.untouched = &untouched;
    last.stream = last.driver->stream_create();
  }).join();
  require(untouched == 8, "nobody else's memory is written to");
  require(sim_live_handles() == 0, "nothing is left");
}

// The double must notice what it is there to notice.
void double_is_strict() {
  const auto expect = [](const std::string& violation) {
    require_equal(sim_first_violation(), violation, "the violation");
    sim_forget_violations();
  };
  const auto driver = offload::make_cuda_driver(0, library);
  offload::cuda::StreamHandle stream = nullptr;
  cuStreamCreate(&stream, 1);
  expect("cuStreamCreate without a current context");
  const Stream foreign = driver->stream_create();
  offload::cuda::ContextHandle context = nullptr;
  cuDevicePrimaryCtxRetain(&context, 1);
  cuCtxPushCurrent_v2(context);
  cuStreamCreate(&stream, 0);
  expect("cuStreamCreate of a stream that blocks on the default stream");
  cuStreamDestroy_v2(static_cast<offload::cuda::StreamHandle>(foreign));
  expect("cuStreamDestroy_v2 with another context's stream");
  cuStreamCreate(&stream, 1);
  cuStreamDestroy_v2(stream);
  cuStreamDestroy_v2(stream);
  expect("cuStreamDestroy_v2 with a stream that does not exist");
  cuStreamDestroy_v2(nullptr);
  expect("cuStreamDestroy_v2 with stream 0");
  cuStreamCreate(&stream, 1);
  Pages pages(2 * kPageBytes);
  const auto device = reinterpret_cast<uintptr_t>(pages.data + kPageBytes);
  cuMemcpyDtoHAsync_v2(pages.data, device, kPageBytes, stream);
  expect("cuMemcpyDtoHAsync_v2 with host memory that is not inside one registration");
  cuMemHostRegister_v2(pages.data, kPageBytes, 1);
  sim_hold_streams(1);
  cuMemcpyDtoHAsync_v2(pages.data, device, kPageBytes, stream);
  cuMemHostUnregister(pages.data);
  expect("cuMemHostUnregister of memory that a copy still uses");
  sim_hold_streams(0);
  driver->device_memory();
  std::thread([&] { cuCtxPushCurrent_v2(context); }).join();
  expect("a thread ended with a context left on its stack");
  cuCtxPopCurrent_v2(&context);
  const pid_t child = fork();
  if (child == 0) {
    cuStreamDestroy_v2(stream);
    _exit(std::string(sim_first_violation()) == "cuStreamDestroy_v2 in a forked child" ? 0 : 1);
  }
  int status = 1;
  waitpid(child, &status, 0);
  require(status == 0, "a call in a forked child is a violation");
}

const std::map<std::string, void (*)()> all_checks = {
    {"capture_is_refused", capture_is_refused},
    {"a_thread_that_ends_may_call", a_thread_that_ends_may_call},
    {"context_is_restored", context_is_restored},
    {"context_is_retained_late", context_is_retained_late},
    {"copies_cross_chunks", copies_cross_chunks},
    {"default_stream_is_legacy", default_stream_is_legacy},
    {"destruction_never_throws", destruction_never_throws},
    {"double_is_strict", double_is_strict},
    {"events_order_streams", events_order_streams},
    {"every_error_is_typed", every_error_is_typed},
    {"fork_is_refused", fork_is_refused},
    {"missing_things_are_named", missing_things_are_named},
    {"optional_entries_may_be_missing", optional_entries_may_be_missing},
    {"registration_is_chunked", registration_is_chunked},
    {"registration_is_rolled_back", registration_is_rolled_back},
    {"threads_share_a_driver", threads_share_a_driver},
    {"waits_keep_their_record", waits_keep_their_record},
};

}  // namespace

int main(int argc, char** argv) {
  if (argc == 1) {
    for (const auto& [name, check] : all_checks) std::printf("%s\n", name.c_str());
    return 0;
  }
  if (argc != 5) return 2;
  library = argv[2];
  library_without_query = argv[3];
  library_without_optional = argv[4];
  try {
    all_checks.at(argv[1])();
    require_equal(sim_first_violation(), "", "the first violation");
    require(sim_current_context() == nullptr, "no context is left");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", argv[1], error.what());
    return 1;
  }
  return 0;
}
