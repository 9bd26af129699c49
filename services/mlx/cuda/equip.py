"""Enable the optimisations for few rows of a model on CUDA."""

import mlx.nn as nn

from protocol.jobs.kernel_report import KernelProbe
from services.mlx.cuda.blocks import use_blocks
from services.mlx.cuda.choice import use_products
from services.mlx.fused_linear import fuse_linears


def equip_for_cuda(model: nn.Module) -> list[KernelProbe]:
    """Join products of equal input, and let traces use our kernels where that pays.

    Returns:
        The measurements; empty if the model is not supported.
    """
    fuse_linears(model)
    products = use_products(model)
    blocks = None if products is None else use_blocks(model, products)
    return [probe for probe in (products, blocks) if probe is not None]
