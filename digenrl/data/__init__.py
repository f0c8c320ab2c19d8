"""Data: prompts from files to steps."""

from digenrl.data.prompts import PromptData, PromptLoader, epoch_length, read_prompts

__all__ = ["PromptData", "PromptLoader", "epoch_length", "read_prompts"]
