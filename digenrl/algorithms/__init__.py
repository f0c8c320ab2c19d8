"""Algorithms: one file, one paper."""

from digenrl.algorithms.flow_grpo import FlowGRPO

__all__ = ["FlowGRPO"]
