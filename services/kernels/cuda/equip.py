"""Enable the optimisations for few rows of a model on CUDA."""

from typing import Any

from protocol.jobs.kernel_report import KernelProbe
from services.kernels.cuda.blocks import use_blocks
from services.kernels.cuda.choice import use_products
from services.runtime.preparation import Steps


def equip_for_cuda(model: Any) -> Steps[list[KernelProbe]]:
    """Let traces use our kernels where that pays, in a model whose products are joined.

    Returns:
        The measurements; empty if the model is not supported.
    """
    products = yield from use_products(model)
    blocks = None if products is None else (yield from use_blocks(model, products))
    return [probe for probe in (products, blocks) if probe is not None]
