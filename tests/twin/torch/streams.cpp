// Streams and events of the simulated devices: what torch's device guard is made of.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <array>
#include <atomic>
#include <mutex>

#include "allocator.h"
#include "device.h"

namespace sim {
namespace {

constexpr StreamId kPoolStreams = 32;
thread_local DeviceIndex device_now = 0;
thread_local std::array<StreamId, kDevices> stream_now{};

c10::Stream stream_of(DeviceIndex device, StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
}

}  // namespace

DeviceIndex current_device() { return device_now; }

DeviceIndex exchange_device(DeviceIndex device) {
  TORCH_CHECK(device < kDevices, "sim: there is no device ", static_cast<int>(device));
  return device < 0 ? device_now : std::exchange(device_now, device);
}

c10::Stream current_stream(DeviceIndex device) {
  if (device < 0) device = device_now;
  return stream_of(device, stream_now[static_cast<size_t>(device)]);
}

StreamHandle handle_of(c10::Stream stream) {
  static std::mutex mutex;
  static std::array<std::array<StreamHandle, kPoolStreams + 1>, kDevices> handles{};
  const StreamId id = stream.id();
  if (id > kPoolStreams) return reinterpret_cast<StreamHandle>(id);  // another library's
  const std::lock_guard lock(mutex);
  const auto device = static_cast<size_t>(stream.device_index());
  StreamHandle& handle = handles[device][static_cast<size_t>(id)];
  if (handle == nullptr)
    handle = id == 0 ? sim_default_stream(static_cast<int>(device)) : sim_stream_create(static_cast<int>(device));
  return handle;
}

void raise_failure() {
  const char* what = sim_failure();
  TORCH_CHECK(what == nullptr, "sim: work on a stream has failed: ", what);
}

void synchronize(c10::Stream stream) {
  sim_stream_synchronize(handle_of(stream));
  raise_failure();
}

namespace {

EventHandle event_of(void* event) { return static_cast<EventHandle>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kSim, exchange_device(device.index()));
  }
  c10::Device getDevice() const override { return c10::Device(kSim, device_now); }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { device_now = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(device.index() < 0 ? device_now : device.index(), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    static std::atomic<StreamId> next{0};
    return stream_of(device.index() < 0 ? device_now : device.index(), 1 + next++ % kPoolStreams);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const DeviceIndex device = stream.device_index();
    return stream_of(device, std::exchange(stream_now[static_cast<size_t>(device)], stream.id()));
  }
  // The driver's name for the default stream is 0.
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return stream.id() == 0 ? nullptr : handle_of(stream);
  }
  bool queryStream(const c10::Stream& stream) const override { return sim_stream_query(handle_of(stream)) != 0; }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return sim_stream_capturing(handle_of(stream)) != 0;
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize(stream); }
  void synchronizeDevice(const DeviceIndex device) const override {
    sim_synchronize(device < 0 ? device_now : device);
    raise_failure();
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = sim_event_create();
    sim_event_record(event_of(*event), handle_of(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) sim_event_wait(event_of(event), handle_of(stream));
  }
  bool queryEvent(void* event) const override { return event == nullptr || sim_event_query(event_of(event)) != 0; }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) sim_event_synchronize(event_of(event));
    raise_failure();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    if (event != nullptr) sim_event_destroy(event_of(event));
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    TORCH_CHECK(from != nullptr && to != nullptr, "sim: both events must be recorded before their time is asked");
    const double elapsed = sim_event_elapsed_ms(event_of(from), event_of(to));
    TORCH_CHECK(elapsed != -1, "sim: both events must be reached before their time is asked");
    return elapsed;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator().recordStream(data, stream);
  }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace sim
