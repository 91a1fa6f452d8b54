// Checks of driver_checks.cpp that copy: which memory is pinned, in which pieces, and what waits for what.
#include <cstring>

#include "driver_bench.h"

namespace checks {

void registration_is_chunked() {
  const auto driver = offload::make_cuda_driver(0, library);
  constexpr size_t kBytes = 3 * kGiB + 5 * kPageBytes;
  const Pages pages(kBytes);
  driver->host_register(pages.data, kBytes);
  require(sim_registrations() == 4, "three chunks of 1 GiB and the rest");
  const auto twice = driver_error([&] { driver->host_register(pages.data, kPageBytes); }, "a second registration");
  require(twice.code == offload::cuda::kAlreadyRegistered, "its code says so");
  require(sim_registrations() == 4, "the first one is still there");
  driver->host_unregister(pages.data);
  require(sim_registrations() == 0, "every chunk is unregistered");
  driver->host_register(pages.data + kPageBytes, kBytes - kPageBytes);
  require(sim_registrations() == 4, "a range that begins between multiples of 1 GiB is cut at the same ones");
  driver->host_unregister(pages.data + kPageBytes);
  require(sim_registrations() == 0, "and unregistered there");
  driver->host_unregister(pages.data);
  driver->host_register(pages.data, 0);
  require(sim_registrations() == 0, "nothing is registered for zero bytes");
  driver->host_unregister(pages.data);
}

void registration_is_rolled_back() {
  const auto driver = offload::make_cuda_driver(0, library);
  constexpr size_t kBytes = 3 * kGiB + 5 * kPageBytes;
  const Pages pages(kBytes);
  for (int chunk = 1; chunk <= 4; ++chunk) {
    sim_fail_at("cuMemHostRegister_v2", chunk, kOutOfMemory);
    const auto error = driver_error([&] { driver->host_register(pages.data, kBytes); }, "a failing chunk");
    require(error.code == kOutOfMemory, "the code is the driver's");
    require_text(error, "asked to pin " + std::to_string(kBytes) + " bytes, failed after " +
                            std::to_string(static_cast<size_t>(chunk - 1) * kGiB) + "; lower host_limit");
    require(sim_registrations() == 0, "the chunks before number " + std::to_string(chunk) + " are given back");
  }
  driver->host_register(pages.data, kBytes);
  require(sim_registrations() == 4, "the range can be registered after all");
  driver->host_unregister(pages.data);
}

void copies_cross_chunks() {
  Bench bench;
  const auto& driver = bench.driver;
  const Pages pages(kGiB + 2 * kPageBytes);
  driver->host_register(pages.data, kGiB + 2 * kPageBytes);
  std::byte* const host = pages.data + kGiB - kPageBytes / 2;
  for (size_t i = 0; i < kPageBytes; ++i) bench.device.data[i] = static_cast<std::byte>(i % 251);
  driver->copy_out(host, bench.device.data, kPageBytes, bench.stream);
  driver->stream_synchronize(bench.stream);
  require(std::memcmp(host, bench.device.data, kPageBytes) == 0, "copied out across the boundary");
  require(sim_calls("cuMemcpyDtoHAsync_v2") == 2, "in two pieces");
  std::memset(bench.device.data, 0, kPageBytes);
  driver->copy_in(bench.device.data, host, kPageBytes, bench.stream);
  driver->copy_in(bench.device.data, pages.data, 0, bench.stream);
  driver->stream_synchronize(bench.stream);
  require(std::memcmp(host, bench.device.data, kPageBytes) == 0, "copied in across the boundary");
  require(sim_calls("cuMemcpyHtoDAsync_v2") == 2, "in two pieces, and zero bytes in none");
  driver->host_unregister(pages.data);
}

void events_order_streams() {
  Bench bench;
  const auto& driver = bench.driver;
  const Stream second = driver->stream_create();
  require(driver->event_done(bench.from), "an event never recorded counts as done");
  sim_hold_streams(1);
  std::memset(bench.host.data, 1, kPageBytes);
  driver->copy_in(bench.device.data, bench.host.data, kPageBytes, bench.stream);
  driver->event_record(bench.from, bench.stream);
  driver->stream_wait(second, bench.from);
  driver->copy_out(bench.host.data, bench.device.data, kPageBytes, second);
  driver->event_record(bench.to, second);
  require(!driver->event_done(bench.from) && !driver->event_done(bench.to), "held events are not done");
  sim_hold_streams(0);
  driver->event_synchronize(bench.to);
  require(driver->event_done(bench.from) && driver->event_done(bench.to), "both are done");
  require(bench.host.data[0] == std::byte{1} && bench.device.data[0] == std::byte{1}, "the bytes arrived");
  require(driver->event_elapsed_ms(bench.from, bench.to) >= 0, "time does not run backwards");
  driver->stream_destroy(second);
}

void waits_keep_their_record() {
  Bench bench;
  const auto& driver = bench.driver;
  const Stream second = driver->stream_create();
  sim_hold_streams(1);
  std::memset(bench.host.data, 1, kPageBytes);
  driver->copy_in(bench.device.data, bench.host.data, kPageBytes, bench.stream);
  driver->event_record(bench.from, bench.stream);
  driver->stream_wait(second, bench.from);
  driver->copy_out(bench.host.data, bench.device.data, kPageBytes, second);
  sim_caller_is_legacy(1);
  driver->event_record(bench.from, nullptr);  // completes at once, on another stream
  require(driver->event_done(bench.from), "the newest record is what a query asks about");
  sim_hold_streams(0);
  driver->stream_synchronize(second);
  require(bench.device.data[0] == std::byte{1} && bench.host.data[0] == std::byte{1}, "the wait was for the first one");
  driver->stream_destroy(second);
}

}  // namespace checks
