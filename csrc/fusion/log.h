// Where readable windows and programs go (TORCH_LOGS=+neuron): a listener that Python sets.
#pragma once

#include <string>

namespace neuron::fusion {

using LogListener = void (*)(const std::string& text);
void set_log_listener(LogListener listener);  // null: none
bool log_enabled();
void write_log(const std::string& text);

}  // namespace neuron::fusion
