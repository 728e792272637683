// Rule: order. What a window holds runs after everything that was queued on its stream before, and before anything that
// comes later can look; two threads that record on one stream take turns, each closing what the other recorded.
//
// Reason: what the host can see is as if every operator had run when it was called.
#include "window.h"

#include <array>
#include <atomic>

#include "aten/graph.h"
#include "cache.h"
#include "core/executor.h"
#include "limits.h"
#include "log.h"
#include "rows.h"
#include "runtime/allocator.h"
#include "runtime/generator.h"
#include "runtime/profiler.h"
#include "stats.h"

namespace neuron::fusion {

namespace {

thread_local bool t_running = false;  // this thread runs a batch
thread_local char t_identity;

// Where a storage is looked for first, modulo the size of the index.
size_t place_in_index(const c10::StorageImpl* storage) {
  return (reinterpret_cast<uintptr_t>(storage) >> 4) * 0x9E3779B97F4A7C15ull >> 40;
}

std::string name_of(const Launch& launch, const Graph& graph) {
  std::string name = launch.nodes.size() > 1 ? "neuron::fused(" : "neuron::";
  for (size_t i = 0; i < launch.nodes.size(); i++) {
    if (i) name.append(", ");
    name.append(graph.nodes[launch.nodes[i]].row->name);
  }
  if (launch.nodes.size() > 1) name.append(")");
  return name;
}

}  // namespace

Window& Window::current(c10::DeviceIndex device) {
  static std::array<std::array<std::atomic<Window*>, DeviceState::kStreams>, 128> windows{};
  const c10::StreamId stream = current_stream(device).id();
  auto& slot = windows[device][stream];
  Window* window = slot.load(std::memory_order_acquire);
  if (C10_LIKELY(window != nullptr)) return *window;
  auto* fresh = new Window(device, device_state(device).streams[stream]);  // lives as long as its stream
  if (slot.compare_exchange_strong(window, fresh)) return *fresh;
  delete fresh;
  return *window;
}

Window::Recording::Recording(Window& window)
    : window_(window),
      call_(C10_UNLIKELY(observer() != nullptr) ? observer()->recorded() : kNobody),
      lock_(window.recording_),
      graph_(&window.open_.graph) {
  while (C10_UNLIKELY(window.thread_ != &t_identity && !graph_->nodes.empty())) {
    lock_.unlock();
    window.close(Closed::thread);
    lock_.lock();
  }
  window.thread_ = &t_identity;
}

uint16_t Window::Recording::storage(c10::StorageImpl& impl, bool overwritten) {
  auto& index = window_.index_;
  auto& held = window_.open_.held;
  if (C10_UNLIKELY(held.size() * 2 >= index.size())) {
    index.assign(std::max<size_t>(256, index.size() * 2), {nullptr, 0});
    for (size_t i = 0; i < held.size(); i++) {
      c10::StorageImpl* known = held[i].strong ? held[i].strong.get() : held[i].weak._unsafe_get_target();
      size_t at = place_in_index(known);
      while (index[at % index.size()].first) at++;
      index[at % index.size()] = {known, static_cast<uint16_t>(i)};
    }
  }
  size_t at = place_in_index(&impl);
  for (;; at++) {
    auto& [known, id] = index[at % index.size()];
    if (known == &impl) return id;
    if (!known) break;
  }
  const auto id = static_cast<uint16_t>(held.size());
  index[at % index.size()] = {&impl, id};
  auto strong = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(&impl);
  char* memory = static_cast<char*>(impl._mutable_data_ptr_no_checks().get());
  if (overwritten) {
    held.push_back({{}, c10::weak_intrusive_ptr<c10::StorageImpl>(strong), memory, impl.nbytes()});
  } else {
    window_.open_.bytes += impl.nbytes();
    held.push_back({std::move(strong),
                    c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>()), memory,
                    impl.nbytes()});
  }
  return id;
}

void Window::Recording::append(const Node& node, std::span<const uint32_t> scalars) {
  graph_->append(node, scalars);
  window_.open_.capture = current_capture();
  count(g_stats.ops_recorded);
  if (graph_->nodes.size() == 1) window_.queue_.set_deferred(&window_);
  if (C10_UNLIKELY(call_ != kNobody)) {
    window_.open_.calls.resize(graph_->nodes.size(), kNobody);
    window_.open_.calls.back() = call_;
  }
  if (graph_->nodes.size() >= kMaxWindowNodes || !settings().fusion || settings().launch_blocking)
    full_ = Closed::nodes;
  else if (window_.open_.bytes >= window_.open_.next_look && window_.open_.keeps_too_much())
    full_ = Closed::memory;
}

void Window::Recording::looked(const c10::StorageImpl& from, std::initializer_list<const at::TensorBase*> filled,
                               LookAgain again) {
  Look look{&from, {}, graph_->nodes.back().first_scalar, std::move(again)};
  for (const at::TensorBase* t : filled) look.filled.push_back(storage(*t->storage().unsafeGetStorageImpl(), false));
  window_.open_.looks.push_back(std::move(look));
}

void Window::Recording::hosted(size_t i, const at::TensorBase& from) {
  const Node& node = graph_->nodes.back();
  window_.open_.hosted.push_back(
      {node.first_scalar + static_cast<uint32_t>(i), node.compute, from.unsafeGetTensorImpl()});
}

void Window::Recording::draws(NeuronGenerator& generator, uint64_t counters) {
  if (C10_LIKELY(!window_.open_.capture)) return;
  window_.open_.draws.push_back(
      {graph_->nodes.size() - 1, c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(&generator), counters});
}

void Window::Recording::finish() {
  lock_.unlock();
  if (full_) window_.close(*full_);
}

bool Window::Batch::keeps_too_much() {
  size_t orphans = 0;
  for (const Held& h : held)
    if (h.strong && h.strong.use_count() == 1) orphans += h.bytes;
  next_look = bytes + kMaxOrphanBytes;
  return orphans >= kMaxOrphanBytes;
}

void Window::Batch::clear() {
  graph.clear();
  held.clear();
  calls.clear();
  hosted.clear();
  looks.clear();
  capture = nullptr;
  draws.clear();
  bytes = 0;
  next_look = kMaxOrphanBytes;
}

void Window::swap_out(Batch& batch) {
  std::swap(open_, batch);
  std::fill(index_.begin(), index_.end(), std::pair<c10::StorageImpl*, uint16_t>{nullptr, 0});
  times_closed_.fetch_add(1, std::memory_order_release);
}

bool Window::take(uint64_t closed, Batch& batch) {
  std::lock_guard lock(recording_);
  if (times_closed() != closed || thread_ != &t_identity || open_.graph.nodes.empty()) return false;
  swap_out(batch);
  queue_.set_deferred(nullptr);
  return true;
}

void Window::close(Closed why) {
  if (t_running) return;  // an allocation of a running program asks for memory back
  std::vector<Held> garbage;
  std::vector<ProgramFacts> facts;
  std::exception_ptr error;
  for (bool ran = false; !ran;) {
    if (!queue_.idle()) queue_.wait(queue_.enqueued());
    std::lock_guard run_lock(running_);
    {
      std::lock_guard lock(recording_);
      if (open_.graph.nodes.empty()) return;
      if (!queue_.idle()) continue;
      swap_out(closed_);
    }
    t_running = true;
    try {
      facts = run(closed_);
    } catch (...) {
      error = std::current_exception();
    }
    t_running = false;
    // What is released may run destructors of anybody's: after the locks.
    garbage.swap(closed_.held);
    closed_.clear();
    {
      std::lock_guard lock(recording_);
      if (open_.graph.nodes.empty()) queue_.set_deferred(nullptr);
    }
    ran = true;
  }
  if (const Observer* o = observer(); C10_UNLIKELY(o && !facts.empty())) o->closed(why, facts);
  if (error) std::rethrow_exception(error);
}

void Window::settle(const c10::StorageImpl& storage) {
  bool written = false;
  {
    std::lock_guard run_lock(running_);  // what another thread runs ends first
    std::lock_guard lock(recording_);
    const Graph& graph = open_.graph;
    for (const Node& node : graph.nodes)
      for (int i = 0; i < node.outputs; i++)
        for (int m = 0; m < graph.operands[node.out[i]].members; m++) {
          const Held& h = open_.held[graph.place(node.out[i], m).storage];
          written |= &storage == (h.strong ? h.strong.get() : h.weak._unsafe_get_target());
        }
  }
  if (written)
    queue_.drain();
  else if (!queue_.idle())
    queue_.wait(queue_.enqueued());
}

std::pair<Graph, std::vector<uint8_t>> Window::pending() {
  std::lock_guard lock(recording_);
  std::vector<uint8_t> live;
  for (const Held& h : open_.held) live.push_back(h.strong ? h.strong.use_count() > 1 : !h.weak.expired());
  return {open_.graph, live};
}

std::vector<ProgramFacts> Window::run(Batch& batch) {
  const size_t n = batch.held.size();
  std::vector<uint8_t> live(n);
  std::vector<char*> memory(n);
  for (size_t i = 0; i < n; i++) {
    Held& h = batch.held[i];
    memory[i] = h.memory;
    if (h.strong) {
      live[i] = h.strong.use_count() > 1;
    } else {
      h.strong = h.weak.lock();
      live[i] = static_cast<bool>(h.strong);
    }
  }
  std::vector<c10::DataPtr> temporaries;
  auto give_memory = [&](size_t s) {
    if (batch.held[s].strong) return;
    temporaries.push_back(allocate_on(device_, batch.held[s].bytes, c10::Device(kNeuron, device_)));
    memory[s] = static_cast<char*>(temporaries.back().mutable_get());
  };
  for (uint16_t s : keep_idle_results(batch.graph, live)) give_memory(s);
  const std::shared_ptr<const Plan> plan = find_or_fuse(batch.graph, live);
  for (uint16_t s : plan->temporaries) give_memory(s);
  std::vector<ProgramFacts> facts;
  if (const Observer* o = observer(); C10_UNLIKELY(o != nullptr))
    facts = facts_of(*o, *plan, batch.graph, batch.calls, memory);
  if (C10_UNLIKELY(batch.capture != nullptr))
    capture(batch, plan, std::move(memory), std::move(temporaries));
  else
    run_plan(*plan, batch.graph, batch.graph.scalars, memory, device_);
  return facts;
}

std::vector<uint16_t> keep_idle_results(const Graph& graph, std::vector<uint8_t>& live) {
  std::vector<uint16_t> kept;
  std::vector<uint8_t> wanted = live;
  auto storages = [&](uint16_t operand, auto f) {
    for (int m = 0; m < graph.operands[operand].members; m++) f(graph.place(operand, m).storage);
  };
  for (const Node& node : graph.nodes)
    for (int i = 0; i < node.inputs; i++) storages(node.in[i], [&](uint16_t s) { wanted[s] = 1; });
  for (const Node& node : graph.nodes) {
    bool idle = true;
    for (int i = 0; i < node.outputs; i++) storages(node.out[i], [&](uint16_t s) { idle = idle && !wanted[s]; });
    if (!idle) continue;
    storages(node.out[0], [&](uint16_t s) {
      live[s] = wanted[s] = 1;
      kept.push_back(s);
    });
  }
  return kept;
}

void run_plan(const Plan& plan, const Graph& graph, std::span<const uint32_t> scalars, std::span<char* const> memory,
              c10::DeviceIndex device) {
  count(g_stats.programs_run, plan.launches.size());
  count(g_stats.ops_fused, plan.fused);
  count(g_stats.stores_elided, plan.stores_elided);
  if (C10_UNLIKELY(log_enabled())) write_log(describe(plan, graph));
  if (C10_LIKELY(!profiling.load(std::memory_order_relaxed)))
    return execute(plan, graph, scalars, memory, parallel_for());
  int64_t start = 0;
  execute(plan, graph, scalars, memory, parallel_for(), [&](const Launch& launch, bool before) {
    if (before)
      start = profiler_time_ns();
    else
      record_activity(name_of(launch, graph), device, start);
  });
}

void Window::capture(const Batch& batch, std::shared_ptr<const Plan> plan, std::vector<char*> memory,
                     std::vector<c10::DataPtr> temporaries) {
  std::vector<uint8_t> written(batch.held.size());
  for (const Node& node : batch.graph.nodes)
    for (int i = 0; i < node.outputs; i++)
      for (int m = 0; m < batch.graph.operands[node.out[i]].members; m++)
        written[batch.graph.place(node.out[i], m).storage] = 1;
  for (size_t i = 0; i < batch.held.size(); i++)
    if (batch.held[i].strong) batch.capture->touch(c10::Storage(batch.held[i].strong), written[i]);
  std::string name;
  for (const Launch& launch : plan->launches) name.append(name.empty() ? "" : " ").append(name_of(launch, batch.graph));
  batch.capture->step(std::move(name),
                      [plan = std::move(plan), graph = batch.graph, draws = batch.draws, memory = std::move(memory),
                       kept = std::make_shared<std::vector<c10::DataPtr>>(std::move(temporaries))]() mutable {
                        for (const Draw& d : draws) {
                          const auto [seed, offset] = static_cast<NeuronGenerator&>(*d.generator).reserve(d.counters);
                          uint32_t* words = graph.scalars.data() + graph.nodes[d.node].first_scalar;
                          for (uint64_t word : {seed, offset}) {
                            *words++ = static_cast<uint32_t>(word);
                            *words++ = static_cast<uint32_t>(word >> 32);
                          }
                        }
                        execute(*plan, graph, graph.scalars, memory, parallel_for());
                      });
}

}  // namespace neuron::fusion
