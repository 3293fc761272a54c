// A device whose memory is the host's and whose kernels are the CPU's: what autograd does for a device, it does for it.
// With AS_CUDA it is torch's device "cuda", of a torch that was built without: it has to be loaded before torch is.

#include <atomic>
#include <cstdlib>
#include <cstring>

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#ifdef AS_CUDA
#define DEVICE CUDA
#else
#define DEVICE PrivateUse1
#endif

namespace {

constexpr auto KIND = c10::DeviceType::DEVICE;
const c10::DispatchKeySet KEYS(c10::DispatchKey::DEVICE);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<KIND> {
  c10::Device getDevice() const override { return {KIND, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return {KIND, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, {KIND, 0}); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, {KIND, 0}); }
};
#ifdef AS_CUDA
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

}  // namespace

namespace at {

struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  const Generator& getDefaultGenerator(c10::DeviceIndex) const override { return detail::getDefaultCPUGenerator(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks)

}  // namespace at

namespace {
#else
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  // Not all versions of torch have these two.
  bool isBuilt() const { return true; }
  bool isAvailable() const { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

const bool has_hooks = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);
#endif

std::atomic<int64_t> held{0}, peak{0};

struct HostMemory final : c10::Allocator {
  static constexpr size_t BLOCK = 512;  // to which CUDA's allocator rounds up; one more holds the size
  static void give_back(void* memory) {
    void* start = static_cast<char*>(memory) - BLOCK;
    held -= *static_cast<int64_t*>(start);
    std::free(start);
  }
  c10::DataPtr allocate(size_t bytes) override {
    int64_t size = (bytes + BLOCK - 1) / BLOCK * BLOCK;
    void* start = std::aligned_alloc(BLOCK, size + BLOCK);
    *static_cast<int64_t*>(start) = size;
    int64_t now = held += size, before = peak;
    while (now > before && !peak.compare_exchange_weak(before, now)) {}
    void* memory = static_cast<char*>(start) + BLOCK;
    return {memory, memory, &give_back, {KIND, 0}};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
} memory;

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device>, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, KEYS, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, KEYS, c10::dtype_or_default(dtype));
}

at::Tensor on_host(const at::Tensor& one) {
  return at::from_blob(one.data_ptr(), one.sizes(), one.strides(), at::TensorOptions().dtype(one.dtype()));
}

at::Tensor on_device(const at::Tensor& one) {
  return one.defined() ? one.to(c10::Device(KIND, 0)) : one;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  at::AutoDispatchBelowADInplaceOrView guard;
  (to.is_cpu() ? to : on_host(to)).copy_(from.is_cpu() ? from : on_host(from));
  return to;
}

at::Tensor& copy_into(at::Tensor& to, const at::Tensor& from, bool) {
  copy_from(from, to, false);
  return to;
}

const at::Tensor& resize_here(const at::Tensor& self, c10::IntArrayRef size, std::optional<c10::MemoryFormat>) {
  size_t bytes = self.dtype().itemsize();
  for (auto one : size) bytes *= one;
  auto storage = self.storage();
  if (storage.nbytes() < bytes) {
    auto data = memory.allocate(bytes);
    std::memcpy(data.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(data));
    storage.set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) resize_here(to, from.sizes(), std::nullopt);
  return copy_from(from, to, false);
}

at::Tensor convolution(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
                       c10::IntArrayRef output_padding, int64_t groups) {
  auto its_bias = bias && bias->defined() ? std::optional<at::Tensor>(on_host(*bias)) : std::nullopt;
  return on_device(at::convolution(on_host(x), on_host(weight), its_bias, stride, padding, dilation, transposed,
                                   output_padding, groups));
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& x, const at::Tensor& weight, c10::IntArrayRef stride,
    c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef output_padding,
    int64_t groups, std::array<bool, 3> wanted) {
  c10::IntArrayRef bias(&gradient.sizes()[1], 1);
  auto [of_x, of_weight, of_bias] = at::convolution_backward(
      on_host(gradient), on_host(x), on_host(weight), bias, stride, padding, dilation, transposed, output_padding,
      groups, wanted);
  return {on_device(of_x), on_device(of_weight), on_device(of_bias)};
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

}  // namespace

TORCH_LIBRARY_IMPL(aten, DEVICE, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("resize_", resize_here);
#ifdef AS_CUDA
  m.impl("copy_", copy_into);
#else
  m.impl("_copy_from", copy_from);
#endif
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("convolution_overrideable", convolution);
  m.impl("convolution_backward_overrideable", convolution_backward);
}

TORCH_LIBRARY_IMPL(_, DEVICE, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

extern "C" int64_t held_bytes() { return held; }
extern "C" int64_t peak_bytes() { return peak; }
