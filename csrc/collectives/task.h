// Collectives are coroutines: straight-line code that waits for peers with `co_await until(condition)`. No torch here.
//
// A Strand runs one coroutine. Whoever drives the engine (engine.h) steps all strands of the process; a step resumes
// the coroutine if the condition it waits for holds. So any number of operations of any number of groups make progress
// in one thread, and none can block another.
#pragma once

#include <coroutine>
#include <exception>
#include <optional>
#include <utility>
#include <vector>

namespace neuron::collectives {

class Strand;

// What a suspended coroutine waits for.
struct Condition {
  virtual bool ready() = 0;

 protected:
  ~Condition() = default;
};

template <class T>
class Task;

namespace detail {

struct PromiseBase {
  std::coroutine_handle<> caller = std::noop_coroutine();
  std::exception_ptr error;

  struct Final {
    bool await_ready() noexcept { return false; }
    template <class P>
    std::coroutine_handle<> await_suspend(std::coroutine_handle<P> h) noexcept {
      return h.promise().caller;
    }
    void await_resume() noexcept {}
  };
  std::suspend_always initial_suspend() noexcept { return {}; }
  Final final_suspend() noexcept { return {}; }
  void unhandled_exception() { error = std::current_exception(); }
};

template <class T>
struct Promise : PromiseBase {
  std::optional<T> value;
  Task<T> get_return_object();
  void return_value(T v) { value = std::move(v); }
  T take() {
    if (error) std::rethrow_exception(error);
    return std::move(*value);
  }
};

template <>
struct Promise<void> : PromiseBase {
  Task<void> get_return_object();
  void return_void() {}
  void take() {
    if (error) std::rethrow_exception(error);
  }
};

}  // namespace detail

// A coroutine that runs when it is awaited; destroying it unwinds it wherever it stands.
template <class T = void>
class [[nodiscard]] Task {
 public:
  using promise_type = detail::Promise<T>;
  explicit Task(std::coroutine_handle<promise_type> h) : handle_(h) {}
  Task(Task&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Task& operator=(Task&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }
  ~Task() {
    if (handle_) handle_.destroy();
  }

  bool await_ready() const noexcept { return false; }
  std::coroutine_handle<> await_suspend(std::coroutine_handle<> caller) noexcept {
    handle_.promise().caller = caller;
    return handle_;
  }
  T await_resume() { return handle_.promise().take(); }

 private:
  friend class Strand;
  std::coroutine_handle<promise_type> handle_;
};

template <class T>
Task<T> detail::Promise<T>::get_return_object() {
  return Task<T>(std::coroutine_handle<Promise<T>>::from_promise(*this));
}
inline Task<void> detail::Promise<void>::get_return_object() {
  return Task<void>(std::coroutine_handle<Promise<void>>::from_promise(*this));
}

class Strand {
 public:
  explicit Strand(Task<> body) : body_(std::move(body)) {}

  bool finished() const { return body_.handle_.done(); }
  std::exception_ptr error() const { return body_.handle_.promise().error; }
  // Runs the coroutine as far as it goes. Returns whether it moved. What its condition throws, it gets.
  bool step() {
    if (finished()) return false;
    try {
      if (waiting_ && !waiting_->ready()) return false;
    } catch (...) {
      fault_ = std::current_exception();
    }
    resume();
    return true;
  }
  // Throws `error` where the coroutine waits.
  void fail(std::exception_ptr error) {
    if (finished()) return;
    fault_ = std::move(error);
    resume();
  }

  static Strand*& current() {
    static thread_local Strand* strand = nullptr;
    return strand;
  }
  // Number of resumptions in this thread: tells a driver whether anything moved.
  static uint64_t& resumptions() {
    static thread_local uint64_t count = 0;
    return count;
  }

 private:
  template <class F>
  friend class Until;
  void resume() {
    Strand* outer = std::exchange(current(), this);
    resumptions()++;
    waiting_ = nullptr;
    std::exchange(leaf_, body_.handle_).resume();
    current() = outer;
  }

  Task<> body_;
  std::coroutine_handle<> leaf_ = body_.handle_;
  Condition* waiting_ = nullptr;
  std::exception_ptr fault_;
};

// Awaitable: goes on when `condition()` is true.
template <class F>
class Until final : Condition {
 public:
  explicit Until(F condition) : condition_(std::move(condition)) {}
  bool ready() override { return condition_(); }
  bool await_ready() { return condition_(); }
  void await_suspend(std::coroutine_handle<> leaf) {
    strand_ = Strand::current();
    strand_->leaf_ = leaf;
    strand_->waiting_ = this;
  }
  void await_resume() {
    if (strand_ && strand_->fault_) std::rethrow_exception(std::exchange(strand_->fault_, nullptr));
  }

 private:
  F condition_;
  Strand* strand_ = nullptr;
};

template <class F>
Until<F> until(F condition) {
  return Until<F>(std::move(condition));
}

// Runs tasks side by side until all are done; the first error ends it (the others are unwound).
inline Task<> all(std::vector<Task<>> tasks) {
  std::vector<Strand> strands;
  strands.reserve(tasks.size());
  for (auto& task : tasks) strands.emplace_back(std::move(task));
  co_await until([&] {
    bool done = true;
    for (Strand& s : strands) {
      s.step();
      if (!s.finished())
        done = false;
      else if (s.error())
        return true;
    }
    return done;
  });
  for (Strand& s : strands)
    if (s.finished() && s.error()) std::rethrow_exception(s.error());
}

}  // namespace neuron::collectives
