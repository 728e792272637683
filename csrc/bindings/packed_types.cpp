// NumPy types of the packed MX words: four fp8 in 32 bits, four fp4 in 16. A word has no value of its own: it is
// copied, compared and hashed as bits, and casts from and to the unsigned integer of its size alone. Registered once
// per process, as the legacy user types of NumPy's C API.
#include "packed_types.h"

#include <algorithm>
#include <cstring>
#define NPY_NO_DEPRECATED_API NPY_1_23_API_VERSION
#include <numpy/arrayobject.h>
#include <numpy/ufuncobject.h>

namespace py = pybind11;

namespace {

struct Packed {
  const char* name;
  const char* qualified;
  const char* doc;
  char code;  // NumPy's one-character code
  NPY_TYPES word;
};

constexpr Packed kFloat8E4m3 = {"float8_e4m3fn_x4", "torchneuron._core.float8_e4m3fn_x4",
                                "Four float8_e4m3fn in 32 bits, the first in the lowest.", 'x', NPY_UINT32};
constexpr Packed kFloat8E5m2 = {"float8_e5m2_x4", "torchneuron._core.float8_e5m2_x4",
                                "Four float8_e5m2 in 32 bits, the first in the lowest.", 'y', NPY_UINT32};
constexpr Packed kFloat4E2m1 = {"float4_e2m1fn_x4", "torchneuron._core.float4_e2m1fn_x4",
                                "Four float4_e2m1fn in 16 bits, the first in the lowest.", 'z', NPY_UINT16};

template <const Packed& type, typename Word>
struct PackedType {
  struct Scalar {
    PyObject_HEAD Word word;
  };
  static inline PyTypeObject* scalar = nullptr;

  static Word word_of(const void* data) {
    Word w;
    std::memcpy(&w, data, sizeof w);
    return w;
  }

  static PyObject* wrap(Word w) {
    auto* s = reinterpret_cast<Scalar*>(scalar->tp_alloc(scalar, 0));
    if (s) s->word = w;
    return reinterpret_cast<PyObject*>(s);
  }

  // The bits of a scalar of this type or of an integer; -1 and an exception for anything else.
  static int unwrap(PyObject* value, Word* out) {
    if (PyObject_TypeCheck(value, scalar)) {
      *out = reinterpret_cast<Scalar*>(value)->word;
      return 0;
    }
    const py::object index = py::reinterpret_steal<py::object>(PyNumber_Index(value));
    if (!index) return -1;
    const unsigned long w = PyLong_AsUnsignedLong(index.ptr());
    if (PyErr_Occurred()) return -1;
    *out = static_cast<Word>(w);
    if (*out == w) return 0;
    PyErr_Format(PyExc_OverflowError, "%lu has more than the %d bits of %s", w, int{8 * sizeof(Word)}, type.name);
    return -1;
  }

  // ---- the scalar -------------------------------------------------------------------------------------------------
  static PyObject* create(PyTypeObject*, PyObject* args, PyObject*) {
    PyObject* value = nullptr;
    Word w = 0;
    if (!PyArg_ParseTuple(args, "|O", &value) || (value && unwrap(value, &w) < 0)) return nullptr;
    return wrap(w);
  }

  static PyObject* to_int(PyObject* self) { return PyLong_FromUnsignedLong(reinterpret_cast<Scalar*>(self)->word); }

  static PyObject* no_number(PyObject*) {
    PyErr_Format(PyExc_TypeError, "%s is four numbers, not one", type.name);
    return nullptr;
  }

  static PyObject* text(PyObject* self) {
    char digits[2 * sizeof(Word) + 1];
    const unsigned long w = reinterpret_cast<Scalar*>(self)->word;
    PyOS_snprintf(digits, sizeof digits, "%0*lx", int{2 * sizeof(Word)}, w);
    return PyUnicode_FromFormat("0x%s", digits);
  }

  static Py_hash_t hash(PyObject* self) { return static_cast<Py_hash_t>(reinterpret_cast<Scalar*>(self)->word); }

  static PyObject* compare(PyObject* a, PyObject* b, int op) {
    if ((op != Py_EQ && op != Py_NE) || !PyObject_TypeCheck(a, scalar) || !PyObject_TypeCheck(b, scalar))
      Py_RETURN_NOTIMPLEMENTED;
    const bool equal = reinterpret_cast<Scalar*>(a)->word == reinterpret_cast<Scalar*>(b)->word;
    return PyBool_FromLong(equal == (op == Py_EQ));
  }

  // ---- arrays -----------------------------------------------------------------------------------------------------
  static PyObject* get(void* data, void*) { return wrap(word_of(data)); }

  static int set(PyObject* value, void* data, void*) {
    Word w;
    if (unwrap(value, &w) < 0) return -1;
    std::memcpy(data, &w, sizeof w);
    return 0;
  }

  static void copy(void* to, void* from, int swap, void*) {
    if (from) std::memcpy(to, from, sizeof(Word));
    if (swap) std::reverse(static_cast<char*>(to), static_cast<char*>(to) + sizeof(Word));
  }

  static void copy_all(void* to, npy_intp to_stride, void* from, npy_intp from_stride, npy_intp n, int swap, void*) {
    for (npy_intp i = 0; i < n; ++i)
      copy(static_cast<char*>(to) + i * to_stride, from ? static_cast<char*>(from) + i * from_stride : nullptr, swap,
           nullptr);
  }

  static npy_bool any(void* data, void*) { return word_of(data) != 0; }

  static int order(const void* a, const void* b, void*) {  // by bits
    return (word_of(a) > word_of(b)) - (word_of(a) < word_of(b));
  }

  static void cast(void* from, void* to, npy_intp n, void*, void*) { std::memcpy(to, from, n * sizeof(Word)); }

  template <bool wanted>
  static void equal(char** args, const npy_intp* n, const npy_intp* strides, void*) {
    for (npy_intp i = 0; i < *n; ++i)
      args[2][i * strides[2]] =
          (word_of(args[0] + i * strides[0]) == word_of(args[1] + i * strides[1])) == wanted ? NPY_TRUE : NPY_FALSE;
  }

  // ---- registration -----------------------------------------------------------------------------------------------
  static void check(bool ok) {
    if (!ok) throw py::error_already_set();
  }

  static void add(py::module_& m, const py::module_& numpy) {
    PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(create)},
                           {Py_tp_repr, reinterpret_cast<void*>(text)},
                           {Py_tp_str, reinterpret_cast<void*>(text)},
                           {Py_tp_hash, reinterpret_cast<void*>(hash)},
                           {Py_tp_richcompare, reinterpret_cast<void*>(compare)},
                           {Py_nb_int, reinterpret_cast<void*>(to_int)},
                           {Py_nb_float, reinterpret_cast<void*>(no_number)},
                           {Py_tp_doc, const_cast<char*>(type.doc)},
                           {0, nullptr}};
    PyType_Spec spec = {type.qualified, sizeof(Scalar), 0, Py_TPFLAGS_DEFAULT, slots};
    const py::tuple bases =
        py::make_tuple(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(&PyGenericArrType_Type)));
    scalar = reinterpret_cast<PyTypeObject*>(PyType_FromSpecWithBases(&spec, bases.ptr()));
    check(scalar);

    static PyArray_ArrFuncs functions;
    PyArray_InitArrFuncs(&functions);
    functions.getitem = get;
    functions.setitem = set;
    functions.copyswap = copy;
    functions.copyswapn = copy_all;
    functions.nonzero = any;
    functions.compare = order;
    static PyArray_DescrProto proto = {};
    Py_SET_REFCNT(reinterpret_cast<PyObject*>(&proto), 1);
    Py_SET_TYPE(reinterpret_cast<PyObject*>(&proto), &PyArrayDescr_Type);
    proto.typeobj = scalar;
    proto.kind = 'V';
    proto.type = type.code;
    proto.byteorder = '=';
    proto.flags = NPY_NEEDS_PYAPI | NPY_USE_GETITEM | NPY_USE_SETITEM;
    proto.elsize = proto.alignment = sizeof(Word);
    proto.f = &functions;
    const int number = PyArray_RegisterDataType(&proto);
    check(number >= 0);

    PyArray_Descr* own = PyArray_DescrFromType(number);
    PyArray_Descr* word = PyArray_DescrFromType(type.word);
    check(own && word && PyArray_RegisterCastFunc(own, type.word, cast) >= 0 &&
          PyArray_RegisterCastFunc(word, number, cast) >= 0);
    int operands[] = {number, number, NPY_BOOL};
    for (const bool wanted : {true, false}) {
      const py::object ufunc = numpy.attr(wanted ? "equal" : "not_equal");
      check(PyUFunc_RegisterLoopForType(reinterpret_cast<PyUFuncObject*>(ufunc.ptr()), number,
                                        wanted ? equal<true> : equal<false>, operands, nullptr) >= 0);
    }
    const auto dtype = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(own));
    const auto constructor = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(scalar));
    constructor.attr("dtype") = dtype;
    // Without it NumPy's own asks for a float.
    const auto no_complex = [](const py::object& self) { check(no_number(self.ptr())); };
    constructor.attr("__complex__") = py::cpp_function(no_complex, py::is_method(constructor));
    numpy.attr("sctypeDict")[type.name] = constructor;  // np.dtype("float8_e4m3fn_x4"), as ml_dtypes has it
    m.attr(type.name) = constructor;
  }
};

}  // namespace

void register_packed_types(py::module_& m) {
  if (_import_array() < 0 || _import_umath() < 0) throw py::error_already_set();
  const auto numpy = py::module_::import("numpy");
  PackedType<kFloat8E4m3, npy_uint32>::add(m, numpy);
  PackedType<kFloat8E5m2, npy_uint32>::add(m, numpy);
  PackedType<kFloat4E2m1, npy_uint16>::add(m, numpy);
}
