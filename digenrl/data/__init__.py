"""Data: prompts from files to steps."""

from digenrl.data.prompts import PromptData, PromptLoader, read_prompts

__all__ = ["PromptData", "PromptLoader", "read_prompts"]
