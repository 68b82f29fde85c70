"""Hand-made steps whose costs can be told by arithmetic.

Chains: forward ops `f0 f1 …` each make one saved tensor that the next one reads; backward ops
`… b1 b0` each read the saved tensor of their number.  Every op takes a second, every tensor has
1000 bytes, and the link moves 1000 bytes a second, unless a test says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from backhaul.records import (
    CodecRecord,
    GraphRecord,
    LinkProfile,
    MachineProfile,
    OpCost,
    OpRecord,
    TensorRecord,
)


class Tiny:
    """Makers of tiny records."""

    @staticmethod
    def codec(packed_bytes: int = 125) -> CodecRecord:
        return CodecRecord(
            name="bits",
            arguments=((1000,), (1,), "float32"),
            packed_bytes=packed_bytes,
            encode_key="encode",
            decode_key="decode",
        )

    @staticmethod
    def tensor(
        name: str,
        *,
        born: int,
        dies: int,
        last: int = -1,
        use: int = -1,
        nbytes: int = 1000,
        role: str = "saved",
        codecs: tuple[CodecRecord, ...] = (),
        pinned: str = "",
    ) -> TensorRecord:
        return TensorRecord(
            name=name,
            module="",
            target="aten.relu.default",
            shape=(nbytes,),
            dtype="uint8",
            nbytes=nbytes,
            role=role,  # type: ignore[arg-type]  # a test writes it
            born=born,
            dies=dies,
            last_forward_use=last,
            first_backward_use=use,
            codecs=codecs,
            pinned_because=pinned,
        )

    @staticmethod
    def graph(op_names: list[str], forward_count: int, *tensors: TensorRecord) -> GraphRecord:
        return GraphRecord(
            fingerprint="tiny",
            ops=tuple(
                OpRecord(name=name, target="aten.relu.default", module="", cost_key=name)
                for name in op_names
            ),
            forward_count=forward_count,
            tensors=tensors,
        )

    @staticmethod
    def chain(
        count: int,
        *,
        nbytes: int = 1000,
        codecs: tuple[CodecRecord, ...] = (),
        pinned: tuple[str, ...] = (),
        extra: tuple[TensorRecord, ...] = (),
    ) -> GraphRecord:
        names = [f"f{i}" for i in range(count)] + [f"b{i}" for i in reversed(range(count))]
        tensors = [
            Tiny.tensor(
                f"f{i}",
                born=i,
                dies=2 * count - 1 - i,
                last=min(i + 1, count - 1),
                use=2 * count - 1 - i,
                nbytes=nbytes,
                codecs=codecs,
                pinned="it is pinned" if f"f{i}" in pinned else "",
            )
            for i in range(count)
        ]
        return Tiny.graph(names, count, *extra, *tensors)

    @staticmethod
    def link(
        d2h_bytes_per_s: float = 1000.0,
        h2d_bytes_per_s: float = 1000.0,
        duplex_d2h: float = 1.0,
        duplex_h2d: float = 1.0,
    ) -> LinkProfile:
        sizes = (0, 1_000_000)
        return LinkProfile(
            tier="tiny",
            sizes_bytes=sizes,
            d2h_s=tuple(size / d2h_bytes_per_s for size in sizes),
            h2d_s=tuple(size / h2d_bytes_per_s for size in sizes),
            duplex_d2h_fraction=duplex_d2h,
            duplex_h2d_fraction=duplex_h2d,
            capacity_bytes=2**40,
            source="assumed",
        )

    @staticmethod
    def machine(
        graph: GraphRecord,
        link: LinkProfile | None = None,
        *,
        alignment_bytes: int = 1,
        duration_s: Mapping[str, float] | None = None,
        workspace_bytes: Mapping[str, int] | None = None,
    ) -> MachineProfile:
        keys = dict.fromkeys([op.cost_key for op in graph.ops if op.cost_key])
        durations = dict.fromkeys(keys, 1.0) | {"encode": 0.25, "decode": 0.5}
        durations |= dict(duration_s or {})
        workspace = dict(workspace_bytes or {})
        return MachineProfile(
            device="tiny",
            torch_version="none",
            alignment_bytes=alignment_bytes,
            link=link or Tiny.link(),
            ops=tuple(
                OpCost(
                    key=key,
                    duration_s=seconds,
                    workspace_bytes=workspace.get(key, 0),
                    source="assumed",
                )
                for key, seconds in durations.items()
            ),
        )


@pytest.fixture
def tiny() -> type[Tiny]:
    return Tiny
