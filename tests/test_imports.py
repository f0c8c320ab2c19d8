"""What `import digenrl` costs, and what it offers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import digenrl

ROOT = Path(__file__).parents[1]


def test_importing_the_package_imports_neither_torch_nor_lightning() -> None:
    code = "import sys, digenrl; dir(digenrl); print(*({name.split('.')[0] for name in sys.modules}))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "digenrl" in result.stdout.split()
    assert not {"torch", "lightning", "numpy", "diffusers", "transformers"} & set(result.stdout.split())


@pytest.mark.parametrize("name", digenrl.__all__)
def test_every_public_name_resolves_to_what_it_names(name: str) -> None:
    assert getattr(digenrl, name).__name__ == name
    assert name in dir(digenrl)


def test_public_names_are_sorted_and_unique() -> None:
    assert list(digenrl.__all__) == sorted(set(digenrl.__all__))


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="`PromptDatum`"):
        _ = digenrl.PromptDatum
