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

c10::intrusive_ptr<c10::ivalue::Future> make_future(std::vector<c10::Device> devices) {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::move(devices));
}

}  // namespace

void WorkState::finish(std::exception_ptr failure) {
  if (!failure) {
    try {
      KernelScope scope(current_device());
      for (auto& [to, from] : copies) to.copy_(from);
    } catch (...) {
      failure = std::current_exception();
    }
  }
  c10::intrusive_ptr<c10::ivalue::Future> waiting;
  {
    std::lock_guard lock(mutex);
    if (failure) error = as_torch_error(failure);
    complete = true;
    waiting = future;
  }
  if (!waiting) return;
  if (error)
    waiting->setErrorIfNeeded(error);
  else
    waiting->markCompleted(outputs);
}

WorkNeuron::WorkNeuron(int rank, c10d::OpType type, std::shared_ptr<GroupOp> op, std::shared_ptr<WorkState> state)
    : Work(rank, type), op_(std::move(op)), state_(std::move(state)) {}

bool WorkNeuron::isCompleted() {
  if (op_->done()) return true;
  collectives::Node::get().engine().kick();
  return false;
}

bool WorkNeuron::isSuccess() const { return op_->done() && !state_->error; }
std::exception_ptr WorkNeuron::exception() const { return op_->done() ? state_->error : nullptr; }

int WorkNeuron::sourceRank() const {
  TORCH_CHECK(state_->source, "sourceRank() is known only for works of recv from any source.");
  return *state_->source;
}

bool WorkNeuron::wait(std::chrono::milliseconds timeout) {
  auto& engine = collectives::Node::get().engine();
  if (timeout == kNoTimeout) {
    engine.wait(*op_);
  } else {
    TORCH_CHECK_WITH(DistBackendError, engine.wait_for(*op_, std::chrono::nanoseconds(timeout).count()),
                     "neuron: ", op_->what(), " is not done after ", timeout.count(),
                     " ms. It goes on in the background.");
  }
  if (state_->error) std::rethrow_exception(state_->error);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> WorkNeuron::getFuture() {
  c10::intrusive_ptr<c10::ivalue::Future> future;
  bool complete;
  {
    std::lock_guard lock(state_->mutex);
    if (state_->future) return state_->future;
    future = state_->future = make_future(state_->devices);
    complete = state_->complete;
  }
  if (!complete) {
    collectives::Node::get().engine().kick();
  } else if (state_->error) {
    future->setErrorIfNeeded(state_->error);
  } else {
    future->markCompleted(state_->outputs);
  }
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
