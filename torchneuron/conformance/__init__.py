"""Conformance of the device: PyTorch's own operator, module and optimizer databases, run on neuron and on CPU.

`python -m torchneuron.conformance` runs them and writes `docs/conformance.md`. A case is one entry of a database, one
data type and one kind of use (forward, `out=`, backward ...); it passes if neuron gives what CPU gives: values, data
types, strides, aliasing, errors. The samples are made once on CPU and copied, so both see the same data.
"""
