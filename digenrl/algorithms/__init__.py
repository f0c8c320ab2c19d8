"""Algorithms: one file, one paper."""

from digenrl.algorithms.awm import AWM
from digenrl.algorithms.crd import CRD
from digenrl.algorithms.dance_grpo import DanceGRPO
from digenrl.algorithms.dgpo import DGPO
from digenrl.algorithms.diffusion_nft import DiffusionNFT
from digenrl.algorithms.flow_grpo import FlowGRPO
from digenrl.algorithms.forward_process import ForwardProcessModule
from digenrl.algorithms.grpo_guard import GRPOGuard
from digenrl.algorithms.mix_grpo import MixGRPO
from digenrl.algorithms.online_dpo import OnlineDPO
from digenrl.algorithms.reverse_process import ReverseProcessModule

__all__ = [
    "AWM",
    "CRD",
    "DGPO",
    "DanceGRPO",
    "DiffusionNFT",
    "FlowGRPO",
    "ForwardProcessModule",
    "GRPOGuard",
    "MixGRPO",
    "OnlineDPO",
    "ReverseProcessModule",
]
