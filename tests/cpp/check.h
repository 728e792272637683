// Tests in C++ without a framework.
//
//   TEST(adds_up) { CHECK_EQ(1 + 1, 2); }      a test; the first failed check ends it
//   CHECK(condition), CHECK_EQ(a, b), CHECK_THROWS(expression, Type)
//   seeds(n)                                    seeds of a randomised test: 0 to n - 1, or NEURON_TEST_SEED alone
//
// Include it in one source file of an executable: it defines main, which runs the tests whose names contain the first
// argument (all without one).
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <sstream>
#include <string>
#include <vector>

namespace check {

struct Failure {
  std::string what;
};

struct Test {
  const char* name;
  void (*run)();
};

inline std::vector<Test>& tests() {
  static std::vector<Test> all;
  return all;
}

struct Register {
  Register(const char* name, void (*run)()) { tests().push_back({name, run}); }
};

template <class... Parts>
[[noreturn]] void fail(const char* file, int line, const Parts&... parts) {
  std::ostringstream out;
  out << file << ":" << line << ": ";
  (out << ... << parts);
  throw Failure{out.str()};
}

inline std::vector<uint64_t> seeds(uint64_t n) {
  if (const char* one = std::getenv("NEURON_TEST_SEED")) return {std::strtoull(one, nullptr, 10)};
  std::vector<uint64_t> all(n);
  for (uint64_t i = 0; i < n; i++) all[i] = i;
  return all;
}

inline int run(const std::string& filter) {
  int failed = 0;
  for (auto& test : tests()) {
    if (std::string(test.name).find(filter) == std::string::npos) continue;
    std::printf("%s ... ", test.name);
    std::fflush(stdout);
    std::string error;
    try {
      test.run();
    } catch (const Failure& failure) {
      error = failure.what;
    } catch (const std::exception& e) {
      error = e.what();
    }
    std::printf("%s\n", error.empty() ? "ok" : ("FAILED\n  " + error).c_str());
    failed += !error.empty();
  }
  return failed ? 1 : 0;
}

}  // namespace check

#define TEST(name)                                              \
  static void test_##name();                                    \
  static const check::Register add_##name(#name, &test_##name); \
  static void test_##name()

#define CHECK(condition)                                           \
  do {                                                             \
    if (!(condition)) check::fail(__FILE__, __LINE__, #condition); \
  } while (false)

#define CHECK_EQ(a, b)                                                                                 \
  do {                                                                                                 \
    const auto check_a = (a);                                                                          \
    const auto check_b = (b);                                                                          \
    if (!(check_a == check_b)) check::fail(__FILE__, __LINE__, #a " is ", check_a, ", not ", check_b); \
  } while (false)

#define CHECK_THROWS(expression, Type)                                                  \
  do {                                                                                  \
    bool check_threw = false;                                                           \
    try {                                                                               \
      (void)(expression);                                                               \
    } catch (const Type&) {                                                             \
      check_threw = true;                                                               \
    }                                                                                   \
    if (!check_threw) check::fail(__FILE__, __LINE__, #expression " throws no " #Type); \
  } while (false)

int main(int argc, char** argv) { return check::run(argc > 1 ? argv[1] : ""); }
