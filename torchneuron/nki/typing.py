"""nki.typing: annotations of kernel arguments: nt.tensor[128, 512]."""

from __future__ import annotations


class _Annotation:
    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, shape: object) -> _Annotation:
        return self

    def __call__(self, *args: object) -> _Annotation:
        return self

    def __repr__(self) -> str:
        return f"nt.{self.name}"


tensor = _Annotation("tensor")
mutable_tensor = _Annotation("mutable_tensor")
