// torch.distributed on the device: a collective is work of a stream, and its bytes are exchanged by a backend for CPUs.
//
// As with NCCL, a synchronous collective (`async_op=False`) runs on the caller's stream. An asynchronous one runs on a
// stream that the device has for them: it starts after the caller's stream, and `wait()` lets the stream that is then
// current wait for it. Unlike NCCL, the host waits for the exchange, so that a rank that is gone is an error at once.
#pragma once

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include "alias.h"
#include "guard.h"
#include "launch.h"

namespace simdevice {

// A collective whose bytes have arrived, though the modelled clock may not be there yet.
class CollectiveWork final : public c10d::Work {
 public:
  // `used` are tensors that must not be freed before a stream waits for the collective.
  CollectiveWork(Stream stream, std::vector<Tensor> results, std::vector<Tensor> used)
      : stream_(stream), results_(std::move(results)), used_(std::move(used)) {
    done_.record(stream_);
  }

  bool isCompleted() override { return done_.query(); }
  bool isSuccess() const override { return true; }
  std::vector<Tensor> result() override { return results_; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    done_.block(Guard().getStream(stream_.device()));
    used_.clear();
  }
  void blockCurrentStream() override { synchronize(); }

  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const c10::StreamGuard guard(stream_);  // the future is complete when this stream has got there
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::ofTensors(), std::vector<Device>{stream_.device()});
    future->markCompleted(c10::IValue(results_));
    return future;
  }

 private:
  Stream stream_;
  c10::Event done_{kSim};
  std::vector<Tensor> results_, used_;
};

class Collective {
 public:
  Collective(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(*stack), schema_(op.schema()), name_(schema_.name()) {}

  void run() {
    const size_t count = schema_.arguments().size();
    const std::vector<c10::IValue> given(stack_.end() - count, stack_.end());
    stack_.resize(stack_.size() - count);
    torch::jit::Stack views;
    for (size_t i = 0; i < count; ++i) views.push_back(take(given[i], schema_.arguments()[i].name()));
    TORCH_CHECK(group_ && device_ >= 0, "simdevice: ", name_, " has no process group or no tensor on the device");
    begin();
    exchange(std::move(views));
    if (schema_.returns().size() == 2) stack_.push_back(given[0]);  // the tensors that were written
    stack_.emplace_back(c10::intrusive_ptr<c10d::Work>(
        c10::make_intrusive<CollectiveWork>(to_stream(number_), written_, read_)));
  }

 private:
  // What the backend gets in place of an argument.
  c10::IValue take(const c10::IValue& value, const std::string& argument) {
    // `output_tensors`, `input_tensors`; tensors that are just `tensors` are read and overwritten.
    const bool write = argument.find("input") == std::string::npos && name_ != "c10d::barrier";
    if (argument == "process_group") {
      group_ = value.toCustomClass<c10d::ProcessGroup>();
      return for_cpu(*group_);
    }
    if (argument == "async_op") is_asynchronous_ = value.toBool();
    if (value.isTensor()) return take(value.toTensor(), write);
    if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (Tensor& tensor : tensors) tensor = take(tensor, write);
      return tensors;
    }
    if (value.isList() && *value.toList().elementType() == *c10::ListType::ofTensors()) {
      auto lists = value.to<std::vector<std::vector<Tensor>>>();
      for (auto& tensors : lists)
        for (Tensor& tensor : tensors) tensor = take(tensor, write);
      return lists;
    }
    return value;
  }

  Tensor take(const Tensor& tensor, bool write) {
    if (!tensor.defined()) return tensor;
    Tensor view = alias_.cpu(tensor);
    device_ = tensor.device().index();
    (write ? written_ : read_).push_back(tensor);
    return view;
  }

  // A group whose backend for CPUs is the one that `group` has for this device.
  static c10::IValue for_cpu(c10d::ProcessGroup& group) {
    auto inner = c10::make_intrusive<c10d::ProcessGroup>(group.getRank(), group.getSize());
    inner->setBackend(c10::kCPU, c10d::ProcessGroup::BackendType::GLOO, group.getBackend(kSim));
    return c10::IValue(std::move(inner));
  }

  // Order, accesses and modelled time.
  void begin() {
    Lock lock(machine().mutex);
    DeviceState& device = machine().devices[device_];
    number_ = current_stream_number[device_];
    if (is_asynchronous_) {
      if (device.collective_stream < 0) device.collective_stream = machine().add_stream(device_);
      c10::Event issued(kSim);
      issued.record(to_stream(number_));
      number_ = device.collective_stream;
      issued.block(to_stream(number_));
    }
    StreamState& stream = state_of(number_);
    const Config& config = machine().config;
    machine().host_time += nanoseconds(config.launch_overhead_s);
    advance(stream);
    for (const Tensor& tensor : read_) touch(stream, tensor, false, name_.c_str());
    for (const Tensor& tensor : written_) touch(stream, tensor, true, name_.c_str());
    flush_all(number_);
    const int64_t bytes = moved_bytes();
    machine().collectives++;
    machine().fabric_bytes += bytes;
    const int64_t duration = nanoseconds(config.fabric_latency_s + bytes / config.fabric_bytes_per_s);
    occupy(stream, device.fabric_time, device.fabric_busy, duration, name_.c_str());
  }

  // Bytes that a rank receives in a ring: of all that is gathered or scattered, everything but its own share.
  int64_t moved_bytes() const {
    if (name_ == "c10d::barrier") return 0;
    int64_t read = 0, written = 0;
    for (const Tensor& tensor : read_) read += bytes_of(tensor);
    for (const Tensor& tensor : written_) written += bytes_of(tensor);
    const int64_t ranks = group_->getSize();
    const int64_t rounds = starts_with(name_, "c10d::allreduce") ? 2 : 1;  // reduce and scatter, then gather
    return rounds * std::max(read, written) * (ranks - 1) / ranks;
  }

  void exchange(torch::jit::Stack views) {
    at::AutoDispatchBelowAutograd below_autograd;
    op_.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &views);
    views.back().toCustomClass<c10d::Work>()->wait();
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const c10::FunctionSchema& schema_;
  const std::string& name_;
  Alias alias_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::vector<Tensor> read_, written_;
  bool is_asynchronous_ = true;
  int device_ = -1;
  int number_ = 0;  // of the stream that it runs on
};

inline void collective(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Collective(op, stack).run(); }

inline void point_to_point(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(false, "simdevice: messages between two ranks are not simulated (", op.schema().name(), ")");
}

// torch's own kernels for this key hand device tensors to the backend as they are.
inline void register_collectives() {
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } handler;  // "overriding a previously registered kernel"
  const c10::WarningUtils::WarningHandlerGuard guard(&handler);
  static torch::Library library(torch::Library::IMPL, "c10d", DispatchKey::PrivateUse1, __FILE__, __LINE__);
  for (const char* name :
       {"broadcast_", "allreduce_", "allreduce_coalesced_", "reduce_", "allgather_", "_allgather_base_",
        "allgather_coalesced_", "allgather_into_tensor_coalesced_", "gather_", "scatter_", "reduce_scatter_",
        "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_", "alltoall_base_", "barrier"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&collective>());
  for (const char* name : {"send", "recv_", "recv_any_source_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&point_to_point>());
}

}  // namespace simdevice
