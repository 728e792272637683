#include "work.h"

#include <ATen/core/ivalue_inl.h>
#include <ATen/ops/copy.h>
#include <c10/util/Exception.h>

#include "aten/bridge.h"
#include "runtime/device.h"

namespace neuron {

using collectives::GroupOp;

namespace {

std::exception_ptr as_torch_error(std::exception_ptr error) {
  try {
    std::rethrow_exception(error);
  } catch (const c10::Error&) {
    return error;
  } catch (const std::exception& e) {
    return std::make_exception_ptr(
        c10::DistBackendError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, e.what()));
  }
}

constexpr int64_t kPatienceNs = 200'000;  // a small collective ends before another thread would have been woken
constexpr int64_t kHelpNs = 20'000'000;

collectives::Engine& engine() { return collectives::Node::get().engine(); }

struct Finished final : Gate {
  explicit Finished(std::shared_ptr<GroupOp> op) : op(std::move(op)) {}
  bool open() const override { return op->done(); }
  void help() override { engine().wait_for(*op, kHelpNs); }
  void kick() override { engine().kick(); }
  std::shared_ptr<GroupOp> op;
};

// A stream waits for an operation.
struct StreamWait final : Task {
  StreamWait(std::shared_ptr<Gate> finished, std::shared_ptr<WorkState> state)
      : finished(std::move(finished)), state(std::move(state)) {}
  void run() override {
    if (state->error) std::rethrow_exception(state->error);
  }
  std::shared_ptr<Gate> gate() const override { return finished; }
  std::shared_ptr<Gate> finished;
  std::shared_ptr<WorkState> state;
};

// The same for the stream of a group, which nobody waits for but through events.
struct GroupWait final : Task {
  GroupWait(std::shared_ptr<Gate> finished, std::shared_ptr<WorkState> state, StreamQueue& queue)
      : finished(std::move(finished)), state(std::move(state)), queue(queue) {}
  void run() override { queue.set_failure(state->error); }
  std::shared_ptr<Gate> gate() const override { return finished; }
  std::shared_ptr<Gate> finished;
  std::shared_ptr<WorkState> state;
  StreamQueue& queue;
};

// For its lifetime, the calling thread's stream of each device is another one.
class OnStreams {
 public:
  template <class F>
  OnStreams(const std::vector<c10::Device>& devices, F stream_of) {
    for (auto& device : devices) before_.push_back(borrow_stream(stream_of(device.index())));
  }
  ~OnStreams() {
    for (auto& stream : before_) borrow_stream(stream);
  }
  OnStreams(const OnStreams&) = delete;

 private:
  std::vector<c10::Stream> before_;
};

c10::intrusive_ptr<c10::ivalue::Future> make_future(std::vector<c10::Device> devices) {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::move(devices));
}

}  // namespace

void throw_as_torch_error(std::exception_ptr error) { std::rethrow_exception(as_torch_error(std::move(error))); }

std::function<void()> WorkState::finish(std::exception_ptr failure) {
  StreamQueue::TaskScope scope;  // streams may wait for this thread
  if (!failure) {
    try {
      KernelScope kernel(current_device());
      for (auto& [to, from] : copies) to.copy_(from);
    } catch (...) {
      failure = std::current_exception();
    }
  }
  std::lock_guard lock(mutex);
  if (failure) error = as_torch_error(failure);
  complete = true;
  if (!future) return nullptr;
  return [this] {
    // Events that tell other streams of this completion must not lie behind what the thread's stream waits for.
    StreamQueue::TaskScope inside;
    OnStreams streams(devices, idle_stream);
    if (error)
      future->setErrorIfNeeded(error);
    else
      future->markCompleted(outputs);
  };
}

WorkNeuron::WorkNeuron(int rank, c10d::OpType type, std::shared_ptr<GroupOp> op, std::shared_ptr<WorkState> state)
    : Work(rank, type), op_(std::move(op)), state_(std::move(state)) {}

bool WorkNeuron::isCompleted() {
  if (op_->done()) return true;
  engine().kick();
  return false;
}

bool WorkNeuron::isSuccess() const { return op_->done() && !state_->error; }
std::exception_ptr WorkNeuron::exception() const { return op_->done() ? state_->error : nullptr; }

int WorkNeuron::sourceRank() const {
  TORCH_CHECK(state_->source, "sourceRank() is known only for works of recv from any source.");
  wait_on_host();
  return *state_->source;
}

void WorkNeuron::wait_on_host() const {
  engine().wait(*op_);
  if (state_->error) std::rethrow_exception(state_->error);
}

bool WorkNeuron::wait(std::chrono::milliseconds timeout) {
  if (timeout != kNoTimeout) {
    TORCH_CHECK_WITH(DistBackendError, engine().wait_for(*op_, std::chrono::nanoseconds(timeout).count()),
                     "neuron: ", op_->what(), " is not done after ", timeout.count(),
                     " ms. It goes on in the background.");
  } else if (!state_->devices.empty() && !settings().launch_blocking && !engine().wait_for(*op_, kPatienceNs)) {
    auto finished = std::make_shared<Finished>(op_);
    for (auto& device : state_->devices)
      current_queue(device.index()).enqueue(std::make_unique<StreamWait>(finished, state_));
    engine().kick();
    return true;
  }
  wait_on_host();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkNeuron::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool complete, by_events;
  {
    std::lock_guard lock(state_->mutex);
    if (auto known = future_ ? future_ : state_->future) return known;
    future = make_future(state_->devices);
    complete = state_->complete;
    by_events = !complete && state_->group && !state_->devices.empty();
    if (by_events)
      future_ = future;
    else
      state_->future = future;
  }
  if (by_events) {
    auto finished = std::make_shared<Finished>(op_);
    OnStreams streams(state_->devices, [&](c10::DeviceIndex index) { return group_stream(index, *state_->group); });
    for (auto& device : state_->devices) {
      auto& queue = current_queue(device.index());
      queue.enqueue(std::make_unique<GroupWait>(finished, state_, queue), true);
    }
    engine().kick();
    future->markCompleted(state_->outputs);
  } else if (!complete) {
    engine().kick();
  } else if (state_->error) {
    future->setErrorIfNeeded(state_->error);
  } else {
    OnStreams streams(state_->devices, idle_stream);
    future->markCompleted(state_->outputs);
  }
  return future;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkDone::getFuture() {
  std::vector<c10::Device> devices;
  for (auto& t : outputs_)
    if (!t.device().is_cpu()) devices.push_back(t.device());
  auto future = make_future(std::move(devices));
  future->markCompleted(outputs_);
  return future;
}

bool WorkBatch::isCompleted() {
  bool done = true;
  for (auto& w : works_) done &= w->isCompleted();
  return done;
}

bool WorkBatch::isSuccess() const {
  for (auto& w : works_)
    if (!w->isSuccess()) return false;
  return true;
}

std::exception_ptr WorkBatch::exception() const {
  for (auto& w : works_)
    if (auto e = w->exception()) return e;
  return nullptr;
}

std::vector<at::Tensor> WorkBatch::result() {
  std::vector<at::Tensor> out;
  for (auto& w : works_) {
    auto r = w->result();
    out.insert(out.end(), r.begin(), r.end());
  }
  return out;
}

bool WorkBatch::wait(std::chrono::milliseconds timeout) {
  for (auto& w : works_) w->wait(timeout);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkBatch::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  for (auto& w : works_) futures.push_back(w->getFuture());
  return c10::collectAll(futures);
}

}  // namespace neuron
