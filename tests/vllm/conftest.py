"""Tests with a real vLLM, in an environment of its own, whose interpreter `make test-vllm` names; others skip them."""

import os

collect_ignore_glob = ["shim", "*judge.py", "*scores.py", "*process.py"]  # what that environment runs
if not os.environ.get("DIGENRL_VLLM_PYTHON"):
    collect_ignore_glob.append("test_*.py")
