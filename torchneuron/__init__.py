"""AWS Trainium as a native PyTorch device. `import torch` loads it through the `torch.backends` entry point."""

__version__ = "0.1.0"


def _autoload() -> None:
    """Entry point that PyTorch calls at the end of `import torch`: registers the device `neuron`.

    It must never break `import torch`: what is missing is remembered and told by `torchneuron info`.
    """
    try:
        from torchneuron import _names

        _names.install()
        import torchneuron.device  # noqa: F401
    except Exception as error:
        global _load_error
        _load_error = error


_load_error: Exception | None = None
