#include "log.h"

#include <atomic>

namespace neuron::fusion {

namespace {
std::atomic<LogListener> g_listener{nullptr};
}

void set_log_listener(LogListener listener) { g_listener.store(listener, std::memory_order_release); }
bool log_enabled() { return g_listener.load(std::memory_order_relaxed) != nullptr; }
void write_log(const std::string& text) {
  if (LogListener listener = g_listener.load(std::memory_order_acquire)) listener(text);
}

}  // namespace neuron::fusion
