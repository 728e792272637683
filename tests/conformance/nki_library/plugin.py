"""pytest plugin for a checkout of nki-library: what the public checkout lacks, and ours as its simulator."""

import os
import sys
import types

# The suite's references follow API 0.3: the OCP scale.
os.environ.setdefault("TORCH_NEURON_MX_SCALE", "ocp")


def _module(name, **names):
    m = types.ModuleType(name)
    m.__dict__.update(names)
    sys.modules[name] = m


_module("test.utils.perf_analysis_private", analyze_trace=lambda *a, **k: None)
_module("test.utils.scripts.remote_lock_scripts", LockResult=object, LockStatus=object)


def pytest_collection_modifyitems(config, items):
    from test.utils.test_orchestrator import Orchestrator

    Orchestrator._compiled_kernel = None  # read but never set in simulation mode
