"""The operators: importing this package registers ``torch.ops.bwattn`` and loads no kernel language."""

from . import autograd, composite, eager, fake, flex, primitive, schema, vmap

__all__ = ["autograd", "composite", "eager", "fake", "flex", "primitive", "schema", "vmap"]
