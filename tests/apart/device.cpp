// A device of torch's (PrivateUse1) whose memory is the host's and whose kernels are the processor's, so that tensors
// have a device of their own: what asks a tensor for its type, reads it without a copy, mixes it with a host tensor, or
// draws from the host's generator for it, shows as it would on a GPU.
//
// Every operator copies its tensors to the processor and back (at::native::cpu_fallback); views and empty tensors are
// made here. Draws come from a generator of the device's own. There is one device, and no stream: it has computed when
// a call returns. How late that may be seen is `elaswave.devices.loopback`'s.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/alloc_cpu.h>
#include <torch/library.h>

#include <cstring>

namespace {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
const c10::Device PLACE(TYPE, 0);

void release(void* data) { c10::free_cpu(data); }

struct Memory final : at::Allocator {
  at::DataPtr allocate(size_t num_bytes) override {
    void* data = num_bytes ? c10::alloc_cpu(num_bytes) : nullptr;
    if (data) std::memset(data, 0x7f, num_bytes);  // whatever is read before it is written is not zero
    return {data, data, &release, PLACE};
  }
  at::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* out, const void* source, size_t num_bytes) const override {
    std::memcpy(out, source, num_bytes);
  }
};

Memory memory;
REGISTER_ALLOCATOR(TYPE, &memory);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device) const override { return PLACE; }
  c10::Device getDevice() const override { return PLACE; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::Stream getStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, PLACE); }
  c10::Stream exchangeStream(c10::Stream) const override { return getStream(PLACE); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// The device's own generator. Its numbers are those of the processor's with the same seed, so that a run on the device
// can be compared with one on the host.
at::Generator& draws() {
  static at::Generator own = at::detail::createCPUGenerator();
  return own;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return draws(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
};

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &memory, keys, c10::dtype_or_default(dtype));
}

// The same memory as a tensor of the processor.
at::Tensor on_host(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  auto whole = c10::Storage(
      c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
      at::DataPtr(tensor.storage().mutable_data(), c10::Device(c10::DeviceType::CPU)));
  auto found = at::empty({0}, tensor.options().device(c10::DeviceType::CPU));
  found.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(whole));
  found.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return found;
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& out, bool) {
  on_host(out).copy_(on_host(source));
  return out;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& out) {
  if (out.sizes() != source.sizes()) at::native::resize_(out, source.sizes());
  return copy_from(source, out, false);
}

at::Scalar local_scalar(const at::Tensor& tensor) { return on_host(tensor).item(); }

at::Tensor as_strided(
    const at::Tensor& tensor, c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, size, stride, offset);
}

// Draws: the processor's, from the device's own generator.
at::Tensor& bernoulli(at::Tensor& tensor, double p, std::optional<at::Generator> source) {
  on_host(tensor).bernoulli_(p, source.has_value() ? source : draws());
  return tensor;
}

at::Tensor& uniform(at::Tensor& tensor, double low, double high, std::optional<at::Generator> source) {
  on_host(tensor).uniform_(low, high, source.has_value() ? source : draws());
  return tensor;
}

at::Tensor& normal(at::Tensor& tensor, double mean, double deviation, std::optional<at::Generator> source) {
  on_host(tensor).normal_(mean, deviation, source.has_value() ? source : draws());
  return tensor;
}

at::Tensor& random_between(
    at::Tensor& tensor, int64_t low, std::optional<int64_t> high, std::optional<at::Generator> source) {
  on_host(tensor).random_(low, high, source.has_value() ? source : draws());
  return tensor;
}

std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  auto mask = at::empty(input.sizes(), input.options().dtype(at::kBool));
  if (!train.value_or(true)) p = 0;
  bernoulli(mask, 1 - p, {});
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1.0 / (1.0 - p)), mask};
}

// Torch asks a device for convolutions by names of their own, which the processor does not have.
at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups) {
  const auto offset = bias.has_value() && bias->defined() ? std::optional(on_host(*bias)) : std::nullopt;
  return at::convolution(
      on_host(input), on_host(weight), offset, stride, padding, dilation, transposed, output_padding, groups).to(PLACE);
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> wanted) {
  const auto [first, second, third] = at::convolution_backward(
      on_host(gradient), on_host(input), on_host(weight), c10::IntArrayRef{weight.size(transposed ? 1 : 0)}, stride,
      padding, dilation, transposed, output_padding, groups, wanted);
  const auto brought = [](const at::Tensor& each) { return each.defined() ? each.to(PLACE) : each; };
  return {brought(first), brought(second), brought(third)};
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  at::native::cpu_fallback(op, stack);
}

void seed(int64_t key) { draws().set_current_seed(static_cast<uint64_t>(key)); }
at::Tensor state() { return draws().get_state(); }
void set_state(const at::Tensor& known) { draws().set_state(known); }

TORCH_LIBRARY(apart, m) {
  m.def("seed(int key) -> ()", &seed);
  m.def("state() -> Tensor", &state);
  m.def("set_state(Tensor state) -> ()", &set_state);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
  m.impl("set_.source_Storage_storage_offset", [](at::Tensor& out, at::Storage source, int64_t offset,
                                                  c10::IntArrayRef size, c10::IntArrayRef stride) -> at::Tensor& {
    return at::native::set_storage_cpu_(out, std::move(source), offset, size, stride);
  });
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("bernoulli_.float", &bernoulli);
  m.impl("uniform_", &uniform);
  m.impl("normal_", &normal);
  m.impl("random_.from", &random_between);
  m.impl("native_dropout", &native_dropout);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

const bool registered = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

}  // namespace
