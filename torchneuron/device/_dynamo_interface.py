"""Dynamo's view of the device: streams, events, properties, for code that it traces."""

from __future__ import annotations

from typing import Any

import torch


def make_interface(base: type) -> type:
    """The interface class; `base` is Dynamo's DeviceInterface, which this module must not import itself."""
    neuron = torch.neuron

    class NeuronInterface(base):
        device = neuron.device
        Event = torch.Event
        Stream = torch.Stream

        class Worker:
            """What a compile worker process asks: never touches the device."""

            @staticmethod
            def set_device(device: int) -> None:
                pass

            @staticmethod
            def current_device() -> int:
                return 0

            @staticmethod
            def get_device_properties(device: Any = None) -> Any:
                return neuron.get_device_properties(device)

        current_device = staticmethod(neuron.current_device)
        set_device = staticmethod(neuron.set_device)
        device_count = staticmethod(neuron.device_count)
        is_available = staticmethod(neuron.is_available)
        stream = staticmethod(neuron.stream)
        current_stream = staticmethod(neuron.current_stream)
        set_stream = staticmethod(neuron.set_stream)
        synchronize = staticmethod(neuron.synchronize)
        get_device_properties = staticmethod(neuron.get_device_properties)
        get_compute_capability = staticmethod(neuron.get_device_capability)
        memory_allocated = staticmethod(neuron.memory_allocated)

        @staticmethod
        def _set_stream_by_id(stream_id: int, device_index: int, device_type: int) -> None:
            neuron.set_stream(torch.Stream(stream_id=stream_id, device_index=device_index, device_type=device_type))

        @staticmethod
        def get_raw_stream(device_index: int) -> int:
            return neuron.current_stream(device_index).stream_id

        @staticmethod
        def exchange_device(device: int) -> int:
            previous = neuron.current_device()
            neuron.set_device(device)
            return previous

        @staticmethod
        def maybe_exchange_device(device: int) -> int:
            return NeuronInterface.exchange_device(device) if device >= 0 else -1

        @staticmethod
        def is_bf16_supported(including_emulation: bool = False) -> bool:
            return True

        @staticmethod
        def is_dtype_supported(dtype: torch.dtype, including_emulation: bool = False) -> bool:
            return True

        @staticmethod
        def is_triton_capable(device: Any = None) -> bool:
            return False

        @staticmethod
        def raise_if_triton_unavailable(device: Any = None) -> None:
            raise RuntimeError("Triton has no neuron target; write the kernel in NKI.")

    return NeuronInterface
