"""The caller's default device and inference mode, set aside while ckptmap makes tensors of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ckptmap.core.devices import tensors_on_cpu


@contextmanager
def cpu_outside_inference_mode(model: object) -> Iterator[None]:
    """Make tensors on the CPU, and outside of inference mode, while the context lasts.

    A moment that is made in inference mode could not be trained. A model that was itself made in
    inference mode can only be filled there, so that the mode stays.
    """
    import torch

    with ExitStack() as modes:
        modes.enter_context(tensors_on_cpu())
        if torch.is_inference_mode_enabled() and not _is_inference(model):
            modes.enter_context(torch.inference_mode(False))
        yield


def _is_inference(model: object) -> bool:
    import torch

    return isinstance(model, torch.nn.Module) and any(
        tensor.is_inference()
        for module in model.modules()
        for some in (module._parameters, module._buffers)
        for tensor in some.values()
        if tensor is not None
    )
