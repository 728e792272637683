// Random numbers of a device: a Philox counter, (seed, offset), as CUDA's generator keeps it.
#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/GeneratorImpl.h>

#include <utility>

#include "device.h"

namespace neuron {

class NeuronGenerator final : public c10::GeneratorImpl {
 public:
  explicit NeuronGenerator(c10::DeviceIndex index, uint64_t seed = c10::default_rng_seed_val);

  void set_current_seed(uint64_t seed) override;
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override;
  void set_offset(uint64_t offset) override;
  uint64_t get_offset() const override { return offset_; }
  // 16 bytes: seed and offset, both little-endian int64 (the layout of CUDA's generator).
  void set_state(const c10::TensorImpl& state) override;
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override;
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override;
  static c10::DeviceType device_type() { return kNeuron; }

  // Takes the next `counters` Philox counters for one operator and returns (seed, first offset). Offsets are multiples
  // of 4, as torch.distributed.tensor expects.
  std::pair<uint64_t, uint64_t> reserve(uint64_t counters);

 private:
  NeuronGenerator* clone_impl() const override;
  uint64_t seed_;
  uint64_t offset_ = 0;
};

const at::Generator& default_generator(c10::DeviceIndex index);
// `generator` or the default one of device `index`. Throws if it belongs to another device.
NeuronGenerator& generator_or_default(const std::optional<at::Generator>& generator, c10::DeviceIndex index);

}  // namespace neuron
