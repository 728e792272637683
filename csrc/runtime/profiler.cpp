// Kineto plug-in. Kineto asks for a session when a profile with ProfilerActivity.PrivateUse1 starts, tells it the
// correlation id of each CPU operator, and collects its activities at the end.
#include "profiler.h"

#include <IActivityProfiler.h>
#include <c10/util/ApproximateClock.h>
#include <libkineto.h>
#include <output_base.h>
#include <torch/csrc/profiler/standalone/privateuse1_profiler.h>

#include <mutex>
#include <vector>

namespace neuron {

std::atomic<bool> profiling{false};

namespace {

struct Activity {
  std::string name;
  int64_t start, end;
  int32_t device, stream;
  uint64_t correlation;
};

std::mutex g_mutex;
std::vector<Activity> g_activities;
thread_local std::vector<uint64_t> t_correlation;

class Session final : public libkineto::IActivityProfilerSession {
 public:
  void start() override {
    std::lock_guard lock(g_mutex);
    g_activities.clear();
    profiling = true;
    status_ = libkineto::TraceStatus::RECORDING;
  }
  void stop() override {
    profiling = false;
    std::lock_guard lock(g_mutex);
    for (auto& a : g_activities) {
      buffer_->emplace_activity(buffer_->span, libkineto::ActivityType::CONCURRENT_KERNEL, a.name);
      auto& out = *buffer_->activities.back();
      out.startTime = a.start;
      out.endTime = a.end;
      out.device = a.device;
      out.resource = a.stream;
      out.id = static_cast<int32_t>(a.correlation);
      out.flow.id = static_cast<uint32_t>(a.correlation);
      out.flow.type = libkineto::kLinkAsyncCpuGpu;
    }
    g_activities.clear();
    status_ = libkineto::TraceStatus::PROCESSING;
  }
  std::vector<std::string> errors() override { return {}; }
  void processTrace(libkineto::ActivityLogger& logger) override {
    for (auto& a : buffer_->activities) logger.handleActivity(*a);
  }
  void processTrace(libkineto::ActivityLogger& logger, libkineto::getLinkedActivityCallback linked, int64_t start,
                    int64_t end) override {
    buffer_->span = libkineto::TraceSpan(start, end, "neuron");
    buffer_->gpuOpCount = static_cast<int>(buffer_->activities.size());
    for (auto& a : buffer_->activities) a->linked = linked(a->id);
    processTrace(logger);
  }
  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override { return nullptr; }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override { return {}; }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override { return std::move(buffer_); }
  void pushCorrelationId(uint64_t id) override { t_correlation.push_back(id); }
  void popCorrelationId() override {
    if (!t_correlation.empty()) t_correlation.pop_back();
  }

 private:
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
};

class Profiler final : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override {
    static const std::string name = "neuron";
    return name;
  }
  const std::set<libkineto::ActivityType>& availableActivities() const override {
    static const std::set<libkineto::ActivityType> types = {libkineto::ActivityType::CONCURRENT_KERNEL,
                                                            libkineto::ActivityType::PRIVATEUSE1_RUNTIME};
    return types;
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(const std::set<libkineto::ActivityType>& types,
                                                                 const libkineto::Config&) override {
    for (auto type : availableActivities())
      if (types.count(type)) return std::make_unique<Session>();
    return nullptr;
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(int64_t, int64_t,
                                                                 const std::set<libkineto::ActivityType>& types,
                                                                 const libkineto::Config& config) override {
    return configure(types, config);
  }
};

}  // namespace

int64_t profiler_time_ns() { return c10::getTime(); }

void record_activity(const std::string& name, c10::DeviceIndex device, int64_t start_ns) {
  Activity a{name,
             start_ns,
             profiler_time_ns(),
             device,
             static_cast<int32_t>(current_stream(device).id()),
             t_correlation.empty() ? 0 : t_correlation.back()};
  std::lock_guard lock(g_mutex);
  g_activities.push_back(std::move(a));
}

void register_profiler() {
  torch::profiler::impl::PrivateUse1ProfilerRegistry::instance().registerFactory(
      [] { return std::make_unique<Profiler>(); });
}

}  // namespace neuron
