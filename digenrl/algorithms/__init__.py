"""Algorithms: one file, one paper."""

from digenrl.algorithms.dgpo import DGPO
from digenrl.algorithms.flow_grpo import FlowGRPO
from digenrl.algorithms.forward_process import ForwardProcessModule

__all__ = ["DGPO", "FlowGRPO", "ForwardProcessModule"]
