#include "fused_step.h"

#include <algorithm>
#include <list>
#include <unordered_map>

#include "aten/factories.h"
#include "fusion/cache.h"
#include "fusion/record.h"
#include "fusion/stats.h"

namespace neuron {

using c10::IValue;
using fusion::Window;

namespace {

// Recordings that a step keeps: shapes of a batch, of its rest, of validation.
constexpr size_t kRecordings = 16;
constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

class FusedStep::Segment {
 public:
  // Steps [first, last) of `steps`.
  Segment(c10::DeviceIndex index, const std::vector<std::unique_ptr<OperatorStep>>& steps, size_t first, size_t last);
  // Runs in a frame whose stream is drained. Adds the steps that are not fusible to `alone`.
  void run(Frame& frame, std::set<size_t>& alone);

 private:
  struct Recording;
  using Key = std::vector<int64_t>;
  // What a run was called with.
  struct Inputs {
    Key key;                   // geometry
    Key numbers;               // of tensors on the host, as bits of a double
    std::vector<char*> bases;  // memory of each input; null for what is no tensor of the device
  };
  Inputs look_at(Frame& frame) const;
  // Null if another thread closed the window meanwhile: the operators have run all the same.
  std::shared_ptr<const Recording> record(Frame& frame, Inputs inputs, std::set<size_t>& alone) const;
  void replay(Frame& frame, const Recording& recording, const Inputs& inputs) const;

  c10::DeviceIndex index_;
  const std::vector<std::unique_ptr<OperatorStep>>& steps_;
  size_t first_, last_;
  std::vector<uint32_t> inputs_;      // slots that come from outside
  std::vector<uint32_t> results_;     // slots of results that are read after the segment
  std::vector<OpCounter*> counters_;  // of operators that become instructions
  std::mutex mutex_;
  std::list<std::shared_ptr<const Recording>> recordings_;  // the latest used first
};

// Without a plan: this geometry is run operator by operator.
struct FusedStep::Segment::Recording {
  Key key;
  // Numbers of the host, if anything but scalars of the graph depends on them; then they are part of the key.
  std::optional<Key> fixed;
  // What the host reads anew in each run, and which inputs hold it.
  std::vector<std::pair<Window::Look, size_t>> looks;
  void look(const std::vector<char*>& bases, const std::vector<char*>& memory, std::vector<uint32_t>& scalars) const;
  // Scalars of the graph that come with the run: which, and which of its numbers.
  std::vector<std::pair<uint32_t, size_t>> numbers;
  fusion::Graph graph;
  std::shared_ptr<const fusion::Plan> plan;

  // Where the graph's storages lie.
  struct Place {
    enum class Kind : uint8_t { nowhere, input, fresh, arena } kind = Kind::nowhere;
    size_t at = 0;  // number of the input or of the fresh storage; offset in the arena
  };
  std::vector<Place> places;
  std::vector<size_t> fresh;  // bytes of each new storage
  size_t arena = 0;           // bytes of all temporaries, reused where lifetimes allow

  struct Result {
    IValue value;  // of results that are no dense tensor of the device
    bool tensor = false;
    bool is_input = false;
    size_t storage = 0;  // number of the input or of the fresh storage
    caffe2::TypeMeta type;
    std::vector<int64_t> sizes, strides;
    int64_t offset = 0;
  };
  std::vector<Result> results;
};

namespace {

void collect_slots(const std::vector<Operand>& operands, std::vector<uint32_t>& slots) {
  for (auto& operand : operands) {
    if (operand.kind == Operand::Kind::slot || operand.kind == Operand::Kind::last_use) slots.push_back(operand.slot);
    collect_slots(operand.items, slots);
  }
}

bool contains(const std::vector<uint32_t>& slots, uint32_t slot) {
  return std::find(slots.begin(), slots.end(), slot) != slots.end();
}

// Tells which scalars of a batch are which of the inputs' numbers. False if something else may depend on a number: it
// was asked for more often than it became a scalar, or as an integer, which not every type holds.
bool numbers_of(const Window::Batch& batch, const std::vector<IValue>& inputs, uint64_t asked,
                std::vector<std::pair<uint32_t, size_t>>& numbers) {
  if (asked != batch.hosted.size()) return false;
  std::unordered_map<const c10::TensorImpl*, size_t> known;
  for (const IValue& input : inputs)
    if (input.isTensor() && input.toTensor().defined() && fusion::host_number(input.toTensor()) &&
        !known.emplace(input.toTensor().unsafeGetTensorImpl(), known.size()).second)
      return false;  // another run's two inputs need not be one tensor
  for (const auto& hosted : batch.hosted) {
    const auto it = known.find(hosted.from);
    if (it == known.end()) continue;  // a number of the graph, or of the key
    if (is_integer(hosted.compute)) return false;
    numbers.emplace_back(hosted.scalar, it->second);
  }
  return true;
}

}  // namespace

void FusedStep::Segment::Recording::look(const std::vector<char*>& bases, const std::vector<char*>& memory,
                                         std::vector<uint32_t>& scalars) const {
  for (auto& [one, input] : looks) {
    c10::SmallVector<char*, 2> filled;
    for (uint16_t s : one.filled) filled.push_back(memory[s]);
    one.again(bases[input], filled, scalars.data() + one.scalars);
  }
}

FusedStep::Segment::Segment(c10::DeviceIndex index, const std::vector<std::unique_ptr<OperatorStep>>& steps,
                            size_t first, size_t last)
    : index_(index), steps_(steps), first_(first), last_(last) {
  for (size_t i = first; i < last; i++) {
    const OperatorStep& step = *steps[i];
    std::vector<uint32_t> read;
    collect_slots(step.arguments(), read);
    for (uint32_t slot : read)
      if (!contains(results_, slot) && !contains(inputs_, slot)) inputs_.push_back(slot);
    results_.insert(results_.end(), step.outs().begin(), step.outs().end());
    if (fusion_of(step.op()) == Fusion::program) counters_.push_back(&counter(toString(step.op().operator_name())));
  }
  for (size_t i = first; i < last; i++)
    for (uint32_t slot : steps[i]->drops) std::erase(results_, slot);
}

FusedStep::Segment::Inputs FusedStep::Segment::look_at(Frame& frame) const {
  Inputs inputs;
  auto& [key, numbers, bases] = inputs;
  for (size_t i = 0; i < inputs_.size(); i++) {
    const IValue& value = frame.any(inputs_[i]);
    bases.push_back(nullptr);
    if (!value.isTensor() || !value.toTensor().defined()) {
      key.push_back(value.isDouble() ? std::bit_cast<int64_t>(value.toDouble())
                    : value.isInt()  ? value.toInt()
                    : value.isBool() ? value.toBool()
                                     : -1);
      continue;
    }
    const at::Tensor& t = value.toTensor();
    if (!frame.is_device(inputs_[i])) {
      // A tensor on the host without dimensions: a number.
      const auto number = fusion::host_number(t);
      key.push_back(static_cast<int64_t>(t.scalar_type()));
      key.push_back(number.has_value() * 2 + t.unsafeGetTensorImpl()->is_wrapped_number());
      if (number) numbers.push_back(std::bit_cast<int64_t>(number->toDouble()));
      continue;
    }
    c10::StorageImpl& storage = *t.storage().unsafeGetStorageImpl();
    bases.back() = static_cast<char*>(storage._mutable_data_ptr_no_checks().get());
    key.push_back(std::find(bases.begin(), bases.end(), bases.back()) - bases.begin());
    key.push_back(t.storage_offset());
    key.push_back(static_cast<int64_t>(storage.nbytes()));
    key.push_back(t.dim());
    key.insert(key.end(), t.sizes().begin(), t.sizes().end());
    key.insert(key.end(), t.strides().begin(), t.strides().end());
  }
  return inputs;
}

void FusedStep::Segment::run(Frame& frame, std::set<size_t>& alone) {
  if (last_ - first_ == 1 && counters_.empty()) return run_step(*steps_[first_], frame);
  Inputs inputs = look_at(frame);
  std::shared_ptr<const Recording> known;
  {
    std::lock_guard lock(mutex_);
    for (auto it = recordings_.begin(); it != recordings_.end(); ++it)
      if ((*it)->key == inputs.key && (!(*it)->fixed || *(*it)->fixed == inputs.numbers)) {
        known = *it;
        if (it != recordings_.begin()) recordings_.splice(recordings_.begin(), recordings_, it);
        break;
      }
  }
  if (!known) {
    known = record(frame, std::move(inputs), alone);
    if (!known) return;
    std::lock_guard lock(mutex_);
    recordings_.push_front(std::move(known));
    if (recordings_.size() > kRecordings) recordings_.pop_back();
  } else if (known->plan) {
    replay(frame, *known, inputs);
    for (size_t i = first_; i < last_; i++)
      for (uint32_t slot : steps_[i]->drops) frame.drop(slot);
  } else {
    for (size_t i = first_; i < last_; i++) run_step(*steps_[i], frame);
  }
}

std::shared_ptr<const FusedStep::Segment::Recording> FusedStep::Segment::record(Frame& frame, Inputs from,
                                                                                std::set<size_t>& alone) const {
  auto recording = std::make_shared<Recording>();
  recording->key = std::move(from.key);
  // Inputs stay known until the storages of the recording are told apart.
  std::vector<IValue> inputs;
  std::vector<c10::StorageImpl*> storages;
  for (uint32_t slot : inputs_) {
    inputs.push_back(frame.device(slot));
    const bool device = inputs.back().isTensor() && frame.is_device(slot);
    storages.push_back(device ? inputs.back().toTensor().storage().unsafeGetStorageImpl() : nullptr);
  }
  Window& window = Window::current(index_);
  const uint64_t closed = window.times_closed(), calls = t_library_calls, asked = fusion::t_host_numbers;
  for (size_t i = first_; i < last_; i++) {
    const uint64_t before = t_library_calls;
    run_step(*steps_[i], frame);
    if (before == t_library_calls) continue;
    // Operators on no elements run at once, too; that says nothing about others.
    const auto& outs = steps_[i]->outs();
    if (std::all_of(outs.begin(), outs.end(), [&](uint32_t slot) {
          const IValue& value = frame.any(slot);
          return !value.isTensor() || !value.toTensor().defined() || value.toTensor().numel() > 0;
        }))
      alone.insert(i);
  }
  if (calls != t_library_calls) return recording;
  Window::Batch batch;
  if (!window.take(closed, batch)) return nullptr;
  if (!numbers_of(batch, inputs, fusion::t_host_numbers - asked, recording->numbers))
    recording->fixed = std::move(from.numbers);

  for (Window::Look& look : batch.looks) {
    const auto input = std::find(storages.begin(), storages.end(), look.from);
    TORCH_INTERNAL_ASSERT(input != storages.end());
    recording->looks.emplace_back(std::move(look), input - storages.begin());
  }
  const size_t n = batch.held.size();
  std::vector<uint8_t> live(n);
  std::vector<char*> memory(n);
  std::vector<c10::StorageImpl*> kept(n);  // storages that outlive the recording
  recording->places.resize(n);
  using Kind = Recording::Place::Kind;
  for (size_t i = 0; i < n; i++) {
    fusion::Held& held = batch.held[i];
    memory[i] = held.memory;
    if (!held.strong) held.strong = held.weak.lock();
    if (!held.strong) continue;
    kept[i] = held.strong.get();
    const auto input = std::find(storages.begin(), storages.end(), kept[i]);
    live[i] = input != storages.end() || held.strong.use_count() > 1;
    if (!live[i]) continue;
    if (input != storages.end()) {
      recording->places[i] = {Kind::input, static_cast<size_t>(input - storages.begin())};
    } else {
      recording->places[i] = {Kind::fresh, recording->fresh.size()};
      recording->fresh.push_back(held.bytes);
    }
  }
  for (uint32_t slot : results_) {
    Recording::Result result;
    const IValue& value = frame.any(slot);
    if (!frame.is_device(slot)) {
      result.value = value;
    } else {
      const at::Tensor& t = value.toTensor();
      auto* storage = t.storage().unsafeGetStorageImpl();
      const auto input = std::find(storages.begin(), storages.end(), storage);
      const auto fresh = std::find(kept.begin(), kept.end(), storage);
      result.tensor = true;
      result.is_input = input != storages.end();
      TORCH_INTERNAL_ASSERT(result.is_input || fresh != kept.end());
      result.storage =
          result.is_input ? static_cast<size_t>(input - storages.begin()) : recording->places[fresh - kept.begin()].at;
      result.type = t.dtype();
      result.sizes = t.sizes().vec();
      result.strides = t.strides().vec();
      result.offset = t.storage_offset();
    }
    recording->results.push_back(std::move(result));
  }

  recording->graph = std::move(batch.graph);
  const fusion::Graph& graph = recording->graph;
  const std::vector<uint16_t> idle = fusion::keep_idle_results(graph, live);
  auto plan = fusion::find_or_fuse(graph, live);
  // Lifetimes of temporaries, in launches: a greedy assignment, the earliest first, each at the lowest offset that is
  // free for as long as it lives.
  struct Life {
    uint16_t storage;
    size_t bytes, first, last, offset;
  };
  std::vector<Life> lives;
  for (uint16_t s : idle) lives.push_back({s, aligned(batch.held[s].bytes), 0, plan->launches.size(), 0});
  for (auto& [look, input] : recording->looks)
    for (uint16_t s : look.filled)
      if (!live[s]) lives.push_back({s, aligned(batch.held[s].bytes), 0, plan->launches.size(), 0});
  for (uint16_t s : plan->temporaries) {
    Life life{s, aligned(batch.held[s].bytes), plan->launches.size(), 0, 0};
    for (size_t l = 0; l < plan->launches.size(); l++)
      for (uint16_t operand : plan->launches[l].operands)
        for (int m = 0; m < graph.operands[operand].members; m++)
          if (graph.place(operand, m).storage == s) life.first = std::min(life.first, l), life.last = l;
    lives.push_back(life);
  }
  std::sort(lives.begin(), lives.end(), [](const Life& a, const Life& b) { return a.first < b.first; });
  for (size_t i = 0; i < lives.size(); i++) {
    std::vector<std::pair<size_t, size_t>> taken;
    for (size_t j = 0; j < i; j++)
      if (lives[j].last >= lives[i].first) taken.emplace_back(lives[j].offset, lives[j].offset + lives[j].bytes);
    std::sort(taken.begin(), taken.end());
    for (auto [begin, end] : taken)
      if (lives[i].offset + lives[i].bytes > begin) lives[i].offset = std::max(lives[i].offset, end);
    recording->arena = std::max(recording->arena, lives[i].offset + lives[i].bytes);
    recording->places[lives[i].storage] = {Kind::arena, lives[i].offset};
  }
  c10::DataPtr arena;
  if (recording->arena) arena = allocate_on(index_, recording->arena, c10::Device(kNeuron, index_));
  for (size_t i = 0; i < n; i++)
    if (recording->places[i].kind == Kind::arena) memory[i] = static_cast<char*>(arena.get()) + recording->places[i].at;
  recording->look(from.bases, memory, recording->graph.scalars);
  fusion::run_plan(*plan, graph, graph.scalars, memory, index_);
  if (auto* o = fusion::observer())
    o->closed(fusion::Closed::compiled, fusion::facts_of(*o, *plan, graph, batch.calls, memory));
  recording->plan = std::move(plan);
  return recording;
}

void FusedStep::Segment::replay(Frame& frame, const Recording& recording, const Inputs& inputs) const {
  using Kind = Recording::Place::Kind;
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> fresh;
  fresh.reserve(recording.fresh.size());
  for (size_t bytes : recording.fresh) fresh.push_back(make_storage(bytes, index_));
  c10::DataPtr arena;
  if (recording.arena) arena = allocate_on(index_, recording.arena, c10::Device(kNeuron, index_));
  std::vector<char*> memory(recording.places.size());
  for (size_t i = 0; i < memory.size(); i++) {
    const auto& place = recording.places[i];
    if (place.kind == Kind::input) memory[i] = inputs.bases[place.at];
    if (place.kind == Kind::fresh) memory[i] = static_cast<char*>(fresh[place.at]->mutable_data());
    if (place.kind == Kind::arena) memory[i] = static_cast<char*>(arena.get()) + place.at;
  }
  const DtypeUse plain;
  for (OpCounter* c : counters_) account(*c, plain);
  std::vector<uint32_t> scalars = recording.graph.scalars;
  for (auto [scalar, number] : recording.numbers)
    scalars[scalar] = *fusion::lane_of(std::bit_cast<double>(inputs.numbers[number]), Dtype::float32);
  recording.look(inputs.bases, memory, scalars);
  fusion::run_plan(*recording.plan, recording.graph, scalars, memory, index_);
  for (size_t i = 0; i < results_.size(); i++) {
    const auto& result = recording.results[i];
    if (!result.tensor) {
      frame.set(results_[i], result.value);
      continue;
    }
    c10::Storage storage = result.is_input ? frame.device(inputs_[result.storage]).toTensor().storage()
                                           : c10::Storage(fresh[result.storage]);
    auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage),
                                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), result.type);
    impl->set_sizes_and_strides(result.sizes, result.strides, result.offset);
    frame.set(results_[i], at::Tensor(std::move(impl)));
  }
}

FusedStep::FusedStep(c10::DeviceIndex index, std::vector<std::unique_ptr<OperatorStep>> steps)
    : index_(index), steps_(std::move(steps)) {
  segments_ = std::make_shared<const Segments>(cut());
}

FusedStep::~FusedStep() = default;

FusedStep::Segments FusedStep::cut() const {
  Segments segments;
  size_t first = 0;
  auto segment = [&](size_t last) {
    if (first < last) segments.push_back(std::make_shared<Segment>(index_, steps_, first, last));
    first = last;
  };
  for (size_t i : alone_) {
    segment(i);
    segment(i + 1);
  }
  segment(steps_.size());
  return segments;
}

void FusedStep::run(Frame& frame) const {
  if (!frame.bridged || !settings().fusion || settings().launch_blocking) {
    for (auto& step : steps_) run_step(*step, frame);
    return;
  }
  std::shared_ptr<const Segments> segments;
  {
    std::lock_guard lock(mutex_);
    segments = segments_;
  }
  std::set<size_t> alone;
  for (auto& segment : *segments) {
    begin_library_call(index_);
    segment->run(frame, alone);
  }
  if (alone.empty()) return;
  std::lock_guard lock(mutex_);
  const size_t known = alone_.size();
  alone_.insert(alone.begin(), alone.end());
  if (alone_.size() > known) segments_ = std::make_shared<const Segments>(cut());
}

}  // namespace neuron
