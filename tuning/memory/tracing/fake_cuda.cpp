// Lets a torch without CUDA trace CUDA's code path on fake tensors: tensors that claim device "cuda" and hold nothing.
//
//  * a device guard that does nothing: autograd asks for one for every device it meets;
//  * CUDA hooks that say a device is there: autograd's engine, autocast and at::getAccelerator() ask;
//  * the choice of attention kernel as CUDA builds make it (torch/aten/src/ATen/native/transformers/cuda/sdp_utils.cpp),
//    for a compute capability given from outside: the CPU build has no choice but the unfused one.
//
// No kernel is added: whoever computes on such a tensor without a fake tensor mode gets an error. Loaded only into a
// process of its own, before torch; see shim.py.

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kDevice = c10::DeviceType::CUDA;

struct FakeCudaGuard final : public c10::impl::NoOpDeviceGuardImpl<kDevice> {
  c10::Device exchangeDevice(c10::Device) const override { return c10::Device(kDevice, 0); }
  c10::Device getDevice() const override { return c10::Device(kDevice, 0); }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }

 private:
  static c10::Stream stream() noexcept { return c10::Stream(c10::Stream::DEFAULT, c10::Device(kDevice, 0)); }
};

// The registry knows hooks by the name of their class, hence no other name than this.
struct CUDAHooks final : public at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex current_device() const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};

int capability = 86;  // 10 * major + minor

bool is_half(const sdp::sdp_params& p) {
  return p.query.scalar_type() == at::kHalf || p.query.scalar_type() == at::kBFloat16;
}

bool dense_4d(const sdp::sdp_params& p) {
  return sdp::has_only_dense_inputs(p) && sdp::check_tensor_shapes(p, false) &&
      sdp::check_nonzero_sequence_lengths_dense(p, false);
}

bool can_use_flash(const sdp::sdp_params& p) {
  const auto allowed = std::vector<at::ScalarType>{at::kHalf, at::kBFloat16};
  if (!sdp::check_runtime_disabled_flash(p, false) || capability < 80 || !dense_4d(p)) return false;
  if (!sdp::check_for_attn_mask(p, false) || !sdp::check_tensor_dtype(p, allowed, false)) return false;
  const auto head = p.query.size(-1);
  if (head > 256 || head != p.key.size(-1) || head != p.value.size(-1)) return false;
  const bool small_sm = capability >= 86 && capability <= 89;  // their shared memory has no room for these backward passes
  const bool lacks_backward = (head > 192 && head <= 224) || (head > 224 && p.dropout > 0.0);
  if (small_sm && lacks_backward && sdp::input_requires_grad(p)) return false;
  if (p.is_causal && p.query.size(-2) != p.key.size(-2)) return false;
  return sdp::check_batch_size_and_num_heads_dense<true>(p, false) &&
      sdp::check_last_dim_stride_equals_1_dense<true>(p, false);
}

bool can_use_efficient(const sdp::sdp_params& p) {
  auto allowed = std::vector<at::ScalarType>{at::kHalf, at::kFloat};
  if (capability >= 80) allowed.push_back(at::kBFloat16);
  if (!sdp::check_runtime_disabled_mem_efficient(p, false) || capability < 50 || !dense_4d(p)) return false;
  if (!sdp::check_tensor_dtype(p, allowed, false)) return false;
  const bool tensor_cores = capability >= 80 || (capability >= 70 && is_half(p));
  const int64_t alignment = std::max<int64_t>(capability >= 80 ? 4 : 1, tensor_cores ? (is_half(p) ? 8 : 4) : 1);
  const auto head = p.query.size(-1), value = p.value.size(-1);
  if (head != p.key.size(-1) || head % alignment != 0 || value % alignment != 0 || head == 0 || value == 0) return false;
  return sdp::check_batch_size_and_num_heads_dense<false>(p, false) &&
      sdp::check_last_dim_stride_equals_1_dense<false>(p, false);
}

// cuDNN's kernel is taken for flash's: it needs nearly the same, and the default order has it after flash.
int64_t choice(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
               const std::optional<at::Tensor>& mask, double dropout, bool is_causal, std::optional<double>,
               bool enable_gqa) {
  const sdp::sdp_params p{query, key, value, mask, dropout, is_causal, enable_gqa};
  for (const auto backend : at::globalContext().sDPPriorityOrder()) {
    if (backend == at::SDPBackend::flash_attention && can_use_flash(p)) return static_cast<int64_t>(backend);
    if (backend == at::SDPBackend::efficient_attention && can_use_efficient(p)) return static_cast<int64_t>(backend);
    if (backend == at::SDPBackend::math && at::globalContext().userEnabledMathSDP()) return static_cast<int64_t>(backend);
  }
  return static_cast<int64_t>(at::SDPBackend::error);
}

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, FakeCudaGuard)
}
namespace at {
// Preferred, so that it also wins in a CUDA build on a machine that has no driver.
C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, CUDAHooks)
}

// Called once torch is imported: a CUDA build registers its own guard and choice on import, which ask the driver.
extern "C" void cardtune_choose_attention(int major, int minor) {
  static const FakeCudaGuard guard;
  const c10::impl::DeviceGuardImplRegistrar last(kDevice, &guard);
  capability = 10 * major + minor;
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choice);
}
