// What lets a PyTorch without CUDA trace for CUDA: fake tensors there, their gradients, and the attention that it has.
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device first(c10::DeviceType::CUDA, 0);
const c10::Stream stream(c10::Stream::DEFAULT, first);

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return first; }
  c10::Device getDevice() const override { return first; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream; }
  c10::Stream getNewStream(c10::Device, int) const override { return stream; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream; }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

// CUDA's choice: flash takes half precision and no mask, the memory-efficient kernel as many heads of keys as of queries.
int64_t choose(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor&, const std::optional<at::Tensor>& mask,
    double, bool, std::optional<double>, bool) {
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  const bool alike = query.size(1) == key.size(1) && query.scalar_type() != at::kDouble;
  const auto rest = alike ? sdp::SDPBackend::efficient_attention : sdp::SDPBackend::math;
  return static_cast<int64_t>(half && !mask ? sdp::SDPBackend::flash_attention : rest);
}

const bool chosen = (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose), true);

} // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

namespace at {
using CUDAHooks = ::Hooks; // the name that it is looked up by
REGISTER_CUDA_HOOKS(CUDAHooks);
} // namespace at
