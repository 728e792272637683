#pragma once
#include <pybind11/pybind11.h>

// Registers the packed MX types with NumPy and adds their scalar types to the module.
void register_packed_types(pybind11::module_& m);
