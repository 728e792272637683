"""AWS Trainium as a native PyTorch device. `import torch` loads it through the `torch.backends` entry point."""

import contextlib
import warnings

__version__ = "0.1.0"


def _autoload() -> None:
    """Entry point that PyTorch calls at the end of `import torch`: registers the device `neuron`.

    It must never break `import torch`: what is missing is remembered and told by `torchneuron info`. Of a setting that
    cannot be read there is a warning, as the user gave it.
    """
    try:
        from torchneuron import _names

        _names.install()
        import torchneuron.device  # noqa: F401
    except Exception as error:
        global _load_error
        _load_error = error
        if isinstance(error, ValueError):
            with contextlib.suppress(Warning):  # warnings may be errors
                warnings.warn(f"The neuron device is not available: {error}", RuntimeWarning, stacklevel=2)


_load_error: Exception | None = None
