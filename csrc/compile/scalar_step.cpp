#include <cmath>
#include <map>

#include "step.h"

namespace neuron {

namespace {

using c10::IValue;

bool both_integers(const IValue* a) { return !a[0].isDouble() && !a[1].isDouble(); }
int64_t integer(const IValue& v) { return v.isBool() ? v.toBool() : v.toInt(); }
double real(const IValue& v) { return v.isDouble() ? v.toDouble() : static_cast<double>(integer(v)); }
bool truth(const IValue& v) { return v.isDouble() ? v.toDouble() != 0 : integer(v) != 0; }
const at::Tensor& tensor(const IValue& v) { return v.toTensor(); }

int64_t dimension(const IValue* a) { return c10::maybe_wrap_dim(integer(a[1]), tensor(a[0]).dim()); }

int64_t floor_divide(int64_t a, int64_t b) {
  TORCH_CHECK_VALUE(b != 0, "integer division by zero in a size of a compiled graph");
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

double floor_modulo(double a, double b) {
  const double m = std::fmod(a, b);
  return m != 0 && (m < 0) != (b < 0) ? m + b : m;
}

int64_t integer_power(int64_t base, int64_t exponent) {
  int64_t out = 1;
  for (; exponent > 0; exponent >>= 1, base *= base)
    if (exponent & 1) out *= base;
  return out;
}

bool less(const IValue& a, const IValue& b) {
  return a.isDouble() || b.isDouble() ? real(a) < real(b) : integer(a) < integer(b);
}

// Half to even, as Python rounds.
int64_t rounded(double v) { return static_cast<int64_t>(std::nearbyint(v)); }

#define ARITHMETIC(name, op)                                      \
  {name, [](const IValue* a, size_t) -> IValue {                  \
     if (both_integers(a)) return integer(a[0]) op integer(a[1]); \
     return real(a[0]) op real(a[1]);                             \
   }}
#define COMPARISON(name, op)                                      \
  {name, [](const IValue* a, size_t) -> IValue {                  \
     if (both_integers(a)) return integer(a[0]) op integer(a[1]); \
     return real(a[0]) op real(a[1]);                             \
   }}
#define VALUE(name, expression) {name, [](const IValue* a, size_t) -> IValue { return expression; }}
#define REALS(name, function) {name, [](const IValue* a, size_t) -> IValue { return function(real(a[0])); }}
#define TO_INTEGER(name, function)                                                             \
  {name, [](const IValue* a, size_t) -> IValue {                                               \
     return a[0].isDouble() ? static_cast<int64_t>(function(a[0].toDouble())) : integer(a[0]); \
   }}

const std::map<std::string, ScalarStep::Function>& table() {
  static const std::map<std::string, ScalarStep::Function> functions = {
      ARITHMETIC("add", +),
      ARITHMETIC("sub", -),
      ARITHMETIC("mul", *),
      COMPARISON("eq", ==),
      COMPARISON("ne", !=),
      COMPARISON("lt", <),
      COMPARISON("le", <=),
      COMPARISON("gt", >),
      COMPARISON("ge", >=),
      VALUE("truediv", real(a[0]) / real(a[1])),
      VALUE("lshift", integer(a[0]) << integer(a[1])),
      VALUE("rshift", integer(a[0]) >> integer(a[1])),
      VALUE("bit_and", a[0].isBool() && a[1].isBool() ? IValue(a[0].toBool() && a[1].toBool())
                                                          : IValue(integer(a[0]) & integer(a[1]))),
      VALUE("bit_or", a[0].isBool() && a[1].isBool() ? IValue(a[0].toBool() || a[1].toBool())
                                                         : IValue(integer(a[0]) | integer(a[1]))),
      VALUE("not", !truth(a[0])),
      VALUE("select", truth(a[0]) ? a[1] : a[2]),
      VALUE("float", real(a[0])),
      VALUE("bool", truth(a[0])),
      VALUE("size", tensor(a[0]).size(dimension(a))),
      VALUE("stride", tensor(a[0]).stride(dimension(a))),
      VALUE("numel", tensor(a[0]).numel()),
      VALUE("storage_offset", tensor(a[0]).storage_offset()),
      TO_INTEGER("int", std::trunc),
      TO_INTEGER("floor", std::floor),
      TO_INTEGER("ceil", std::ceil),
      TO_INTEGER("round", rounded),
      REALS("sqrt", std::sqrt),
      REALS("cos", std::cos),
      REALS("cosh", std::cosh),
      REALS("sin", std::sin),
      REALS("sinh", std::sinh),
      REALS("tan", std::tan),
      REALS("tanh", std::tanh),
      REALS("asin", std::asin),
      REALS("acos", std::acos),
      REALS("atan", std::atan),
      REALS("log2", std::log2),
      {"floordiv",
       [](const IValue* a, size_t) -> IValue {
         if (both_integers(a)) return floor_divide(integer(a[0]), integer(a[1]));
         return std::floor(real(a[0]) / real(a[1]));
       }},
      {"mod",
       [](const IValue* a, size_t) -> IValue {
         if (!both_integers(a)) return floor_modulo(real(a[0]), real(a[1]));
         return integer(a[0]) - floor_divide(integer(a[0]), integer(a[1])) * integer(a[1]);
       }},
      {"pow",
       [](const IValue* a, size_t) -> IValue {
         if (both_integers(a) && integer(a[1]) >= 0) return integer_power(integer(a[0]), integer(a[1]));
         return std::pow(real(a[0]), real(a[1]));
       }},
      {"neg", [](const IValue* a, size_t) -> IValue { return a[0].isDouble() ? IValue(-a[0].toDouble()) : IValue(-integer(a[0])); }},
      {"pos", [](const IValue* a, size_t) -> IValue { return a[0].isDouble() ? a[0] : IValue(integer(a[0])); }},
      {"abs",
       [](const IValue* a, size_t) -> IValue {
         return a[0].isDouble() ? IValue(std::abs(a[0].toDouble())) : IValue(std::abs(integer(a[0])));
       }},
      VALUE("min", less(a[1], a[0]) ? a[1] : a[0]),
      VALUE("max", less(a[0], a[1]) ? a[1] : a[0]),
      {"sum",
       [](const IValue* a, size_t n) -> IValue {
         int64_t total = 0;
         for (size_t i = 0; i < n; i++) total += integer(a[i]);
         return total;
       }},
  };
  return functions;
}

#undef ARITHMETIC
#undef COMPARISON
#undef VALUE
#undef REALS
#undef TO_INTEGER

}  // namespace

ScalarStep::ScalarStep(const std::string& name, std::vector<Operand> arguments, uint32_t out)
    : arguments_(std::move(arguments)), out_(out) {
  auto it = table().find(name);
  TORCH_CHECK_VALUE(it != table().end(), "No scalar function is called '", name, "'.");
  function_ = it->second;
}

void ScalarStep::run(Frame& frame) const {
  c10::SmallVector<IValue, 4> values;
  for (auto& argument : arguments_)
    values.push_back(argument.kind == Operand::Kind::constant ? argument.constant : frame.any(argument.slot));
  frame.set(out_, function_(values.data(), values.size()));
}

std::vector<std::string> scalar_functions() {
  std::vector<std::string> names;
  for (auto& [name, function] : table()) names.push_back(name);
  return names;
}

}  // namespace neuron
