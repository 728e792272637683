# torchneuron._core: the software NeuronCore in Python. NEURON_PYTHON_DIR: where a development build puts the modules.
find_package(Python COMPONENTS Interpreter Development.Module NumPy REQUIRED)
find_package(pybind11 CONFIG QUIET)
if(NOT pybind11_FOUND)
  execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir OUTPUT_VARIABLE pybind11_DIR
                  OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  find_package(pybind11 CONFIG REQUIRED)
endif()
pybind11_add_module(_core ${CMAKE_CURRENT_LIST_DIR}/core.cpp ${CMAKE_CURRENT_LIST_DIR}/packed_types.cpp)
target_link_libraries(_core PRIVATE neuroncore Python::NumPy Threads::Threads)
target_compile_options(_core PRIVATE ${NEURON_WARNINGS})
if(NEURON_PYTHON_DIR)
  set_target_properties(_core neuroncore PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${NEURON_PYTHON_DIR})
  set_target_properties(_core PROPERTIES BUILD_WITH_INSTALL_RPATH ON)
endif()
install(TARGETS _core neuroncore LIBRARY DESTINATION torchneuron)
# The vendor's names for those who import them before torch.
install(FILES ${PROJECT_SOURCE_DIR}/shims/nki.py ${PROJECT_SOURCE_DIR}/shims/torch_neuronx.py DESTINATION .)
