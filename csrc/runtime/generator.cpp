#include "generator.h"

#include <ATen/ops/empty.h>
#include <c10/core/TensorImpl.h>

#include <array>
#include <cstring>

namespace neuron {

namespace {
struct State {
  int64_t seed, offset;
};
static_assert(sizeof(State) == 16);
}  // namespace

NeuronGenerator::NeuronGenerator(c10::DeviceIndex index, uint64_t seed)
    : GeneratorImpl(c10::Device(kNeuron, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), seed_(seed) {}

void NeuronGenerator::set_current_seed(uint64_t seed) {
  seed_ = seed;
  offset_ = 0;
}

uint64_t NeuronGenerator::seed() {
  set_current_seed(c10::detail::getNonDeterministicRandom());
  return seed_;
}

void NeuronGenerator::set_offset(uint64_t offset) {
  TORCH_CHECK(offset % 4 == 0, "A Philox offset must be a multiple of 4, got ", offset, ".");
  offset_ = offset;
}

void NeuronGenerator::set_state(const c10::TensorImpl& state) {
  TORCH_CHECK_TYPE(state.layout() == c10::kStrided && state.device_type() == c10::kCPU &&
                       state.dtype() == caffe2::TypeMeta::Make<uint8_t>(),
                   "The state of a random generator is a torch.ByteTensor on the CPU. Take it from get_state().");
  TORCH_CHECK(state.is_contiguous() && state.numel() == sizeof(State),
              "The state of a neuron generator is a contiguous CPU tensor of ", sizeof(State),
              " bytes (torch.uint8): seed and offset. Take it from get_state().");
  State s;
  std::memcpy(&s, state.data(), sizeof s);
  seed_ = static_cast<uint64_t>(s.seed);
  set_offset(static_cast<uint64_t>(s.offset));
}

c10::intrusive_ptr<c10::TensorImpl> NeuronGenerator::get_state() const {
  State s{static_cast<int64_t>(seed_), static_cast<int64_t>(offset_)};
  at::Tensor t = at::empty({static_cast<int64_t>(sizeof s)}, at::TensorOptions(at::kByte).device(at::kCPU));
  std::memcpy(t.mutable_data_ptr(), &s, sizeof s);
  return t.getIntrusivePtr();
}

void NeuronGenerator::graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) {
  auto* other = dynamic_cast<NeuronGenerator*>(state.get());
  TORCH_CHECK(other, "The state of a neuron generator must come from a neuron generator.");
  seed_ = other->seed_;
  offset_ = other->offset_;
}

c10::intrusive_ptr<c10::GeneratorImpl> NeuronGenerator::graphsafe_get_state() const {
  return c10::intrusive_ptr<c10::GeneratorImpl>::reclaim(clone_impl());
}

std::pair<uint64_t, uint64_t> NeuronGenerator::reserve(uint64_t counters) {
  std::lock_guard lock(mutex_);
  uint64_t first = offset_;
  offset_ += (counters + 3) / 4 * 4;
  return {seed_, first};
}

NeuronGenerator* NeuronGenerator::clone_impl() const {
  auto* copy = new NeuronGenerator(device_.index(), seed_);
  copy->offset_ = offset_;
  return copy;
}

const at::Generator& default_generator(c10::DeviceIndex index) {
  // Leaked: operators may run while static destructors do.
  static auto* generators = [] {
    auto* made = new std::vector<at::Generator>;
    for (int i = 0; i < device_count(); i++) made->push_back(at::make_generator<NeuronGenerator>(i));
    return made;
  }();
  return (*generators)[resolve_device(index)];
}

NeuronGenerator& generator_or_default(const std::optional<at::Generator>& generator, c10::DeviceIndex index) {
  if (!generator || !generator->defined())
    return *static_cast<NeuronGenerator*>(default_generator(index).unsafeGetGeneratorImpl());
  TORCH_CHECK(generator->device().type() == kNeuron, "Expected a 'neuron' device type for generator but found '",
              generator->device().type(), "'");
  TORCH_CHECK(generator->device().index() == index, "Expected a generator of neuron:", static_cast<int>(index),
              " but found one of neuron:", static_cast<int>(generator->device().index()), ".");
  return *static_cast<NeuronGenerator*>(generator->unsafeGetGeneratorImpl());
}

}  // namespace neuron
