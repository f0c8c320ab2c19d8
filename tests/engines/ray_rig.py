"""A worker for tests of the Ray engine; apart, as it is imported in each worker."""

from __future__ import annotations

import importlib
import os
from typing import Any

import ray
import torch

from digenrl.engines import ObjectRef
from tests.engines.test_engines import Bench, TidyError


class Rig(Bench):
    """A worker with what Ray adds."""

    def print_lines(self, *lines: str) -> None:
        for line in lines:
            print(line)

    def print_natively(self, line: str) -> None:
        os.write(2, line.encode() + b"\n")

    def keep_and_read(self, value: Any) -> Any:
        ref = self.store.put(value)
        value = self.store.get(ref)
        self.store.free([ref])
        return value

    def keep_and_fail(self) -> None:
        self.store.put(torch.zeros(1 << 20))
        raise TidyError(1)

    def pass_on(self, ref: ObjectRef) -> ObjectRef:
        return ref

    def copy(self, ref: ObjectRef) -> ObjectRef:
        return self.store.put(self.store.get(ref))

    def keep_two(self, first: Any, second: Any) -> tuple[ObjectRef, ObjectRef]:
        return self.store.put(first), self.store.put(second)

    def remember(self, ref: ObjectRef) -> None:
        self.ref = ref

    def read_remembered(self) -> Any:
        return self.store.get(self.ref)

    def keep_here(self, value: Any) -> ObjectRef:
        self.ref = self.store.put(value)
        return self.ref

    def free_what_is_here(self) -> None:
        self.store.put(torch.zeros(1))
        self.store.free([self.ref])

    def let_go(self) -> None:
        self.held = None

    def node(self) -> str:
        node_id: str = ray.get_runtime_context().get_node_id()
        return node_id

    def import_and_call(self, module: str, name: str) -> Any:
        return getattr(importlib.import_module(module), name)()

    def imports_from(self, module: str) -> str:
        return str(importlib.import_module(module).__file__)

    def read_it(self, ref: ObjectRef) -> None:
        self.store.get(ref)
