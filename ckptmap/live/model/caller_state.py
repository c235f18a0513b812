"""What a caller has set for its own tensors, and ours must not follow: device and inference mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def ordinary(model: object) -> Iterator[None]:
    """Tensors that name no device are made on the CPU, and such that can be trained: moments made in
    inference mode could not be. A model that was itself made in that mode can only be filled there.
    """
    import torch

    with ExitStack() as modes:
        if torch.get_default_device().type != "cpu":
            modes.enter_context(torch.device("cpu"))
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
